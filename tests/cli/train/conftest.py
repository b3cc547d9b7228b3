"""Each test is alone in a folder of its own, and trains as users do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trainkit.config import allow_targets
from trainkit.lit.proof.start import ProofAtStart

allow_targets("tests")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["trainkit"])


@pytest.fixture(autouse=True)
def with_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProofAtStart, "is_on", True)
