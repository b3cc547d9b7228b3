"""What becomes of the other ranks when the first one is through."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from lightning.pytorch import Trainer

from trainkit.cli.errors import TrainingFailed
from trainkit.cli.runs import ranks
from trainkit.cli.runs.ranks import ranks_of_one_run

SLEEPS = "import time; time.sleep(600)"


def with_rank(program: str) -> tuple[Trainer, subprocess.Popen[bytes]]:
    """A Trainer whose launcher has started one process."""
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    process = subprocess.Popen([sys.executable, "-c", program])
    trainer.strategy.launcher.procs.append(process)  # type: ignore[union-attr]
    return trainer, process


def test_they_are_waited_for_and_the_environment_is_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    trainer, process = with_rank("import time; time.sleep(0.2)")
    with ranks_of_one_run(trainer):
        monkeypatch.setenv("MASTER_PORT", "2")
        monkeypatch.setenv("LOCAL_RANK", "0")
    assert process.returncode == 0
    assert os.environ["MASTER_PORT"] == "1"
    assert "LOCAL_RANK" not in os.environ  # or the next run would start no ranks


def test_one_that_fails_fails_the_run() -> None:
    trainer, _ = with_rank("raise SystemExit(3)")
    with pytest.raises(
        TrainingFailed, match=r"another rank failed; exit statuses: \[3\]"
    ):
        with ranks_of_one_run(trainer):
            pass


def test_after_an_error_one_that_hangs_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "_TO_END_AFTER_AN_ERROR", 0.1)
    trainer, process = with_rank(SLEEPS)
    with pytest.raises(ZeroDivisionError):
        with ranks_of_one_run(trainer):
            raise ZeroDivisionError
    assert process.poll() is not None


def test_a_run_without_other_ranks_leaves_the_environment_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They may be torchrun's, which started this process too."""
    trainer = Trainer(accelerator="cpu", devices=1, logger=False)
    with ranks_of_one_run(trainer):
        monkeypatch.setenv("MASTER_PORT", "3")
    assert os.environ["MASTER_PORT"] == "3"
