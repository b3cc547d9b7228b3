"""The private names of Lightning and wandb: what each of them is today."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import WandbLogger

from trainkit.cli import _compat


def test_the_run_of_a_logger(private_wandb: Path) -> None:
    logger = WandbLogger(offline=True)
    assert _compat.run_of(logger) is None  # and asking made none
    run: Any = logger.experiment
    assert _compat.run_of(logger) is run
    other = WandbLogger(offline=True)
    _compat.set_run(other, run)
    assert other.experiment is run
    assert not _compat.is_finished(run)
    run.finish()
    assert _compat.is_finished(run)


def test_a_logger_that_came_by_pickle_is_attached(private_wandb: Path) -> None:
    logger = WandbLogger(offline=True)
    run: Any = logger.experiment
    assert not _compat.is_attached(logger)
    assert _compat.is_attached(pickle.loads(pickle.dumps(logger)))
    run.finish()


@pytest.mark.parametrize("how", [{}, {"strategy": "ddp", "devices": 2}])
def test_ranks_are_taken_over_and_lightning_watches_none(how: dict[str, Any]) -> None:
    trainer: Any = Trainer(accelerator="cpu", logger=False, **how)
    assert _compat.take_over_ranks(trainer) == []
    if how:
        process = subprocess.Popen([sys.executable, "-c", ""])
        trainer.strategy.launcher.procs.append(process)
        assert _compat.take_over_ranks(trainer) == [process]
        assert _compat.take_over_ranks(trainer) == []
        process.wait(240)
