"""Here trainings begin with a proof, as those of users do."""

import pytest
import torch

from trainkit.lit.measure.begin import begin_proof
from trainkit.lit.split import windows
from trainkit.lit.windows import streamed


@pytest.fixture(autouse=True)
def with_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    for user in (windows, streamed):
        monkeypatch.setattr(user, "begin_proof", begin_proof)
