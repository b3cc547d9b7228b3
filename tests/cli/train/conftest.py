"""Each test is alone in a folder of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trainkit.config import allow_targets

allow_targets("tests")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["trainkit"])
