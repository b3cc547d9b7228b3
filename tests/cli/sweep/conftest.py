"""What the tests of sweeps share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.sweep.helpers import private_env


@pytest.fixture
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A private HOME, nothing of W&B's inherited; returns the folder to work in.

    Trials that a sweep starts from here are forks, and it looks at them often: the
    client writes their rows at once."""
    for name in os.environ.keys() - (env := private_env(tmp_path)).keys():
        monkeypatch.delenv(name)
    soon = {"WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "0.05"}
    for name, value in {**env, **soon}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("trainkit.cli.sweep.offline._TICK", 0.02)
    monkeypatch.setattr("trainkit.cli.sweep.offline._LOOK_EVERY", 0.1)
    return tmp_path
