"""Here trainings begin with a proof, as those of users do."""

import pytest
import torch

from trainkit.lit.proof.start import ProofAtStart


@pytest.fixture(autouse=True)
def with_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(ProofAtStart, "is_on", True)
