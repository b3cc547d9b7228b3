"""What an evaluation changes in the Trainer of a training."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection
from typing import Any

from lightning.pytorch.callbacks import Checkpoint, LearningRateMonitor, TQDMProgressBar

from trainkit.cli.evaluate.evaluation import NoLogger
from trainkit.cli.runs.folder import RunFolder
from trainkit.lit.logs.monitor import WindowMonitor
from trainkit.lit.logs.plain_comparison import PlainComparison
from trainkit.lit.logs.step_progress import StepProgress
from trainkit.lit.resume.graceful_stop import GracefulStop

ONE_DEVICE = {"devices": 1, "num_nodes": 1, "strategy": "auto"}
"""What makes an evaluation exact: of several ranks the last may get padded rows."""

_OF_TRAININGS = (
    Checkpoint,
    LearningRateMonitor,
    PlainComparison,
    StepProgress,
    WindowMonitor,
)

_ABOUT_TRAININGS = (
    r".*callbacks used to create the checkpoint need to be provided.*",
    r".*The dirpath has changed from.*",
    r".*srun. command is available on your system.*",
)


def put_on_one_device(verb: str, trainer: Any, given: Collection[str]) -> None:
    """Set one device in the configuration of a Trainer, unless the words say it.

    Args:
        verb: of the command, for what is printed.
        trainer: the configuration, which is changed.
        given: the keys that the command line gives.
    """
    if {f"trainer.{name}" for name in ONE_DEVICE} & set(given):
        return
    had = [
        f"trainer.{name}={trainer[name]}"
        for name in ("devices", "num_nodes")
        if trainer.get(name, 1) not in (1, "1", "auto", [0])
    ]
    if had:
        print(
            f"trainkit | {verb}: on one device, which gives each row once; the run had "
            f"{' and '.join(had)}",
            flush=True,
        )
    for name, value in ONE_DEVICE.items():
        trainer[name] = value


def prepare(trainer: Any, folder: RunFolder) -> None:
    """Let a Trainer write nothing, and stop at a signal."""
    trainer.loggers = [NoLogger(folder.path)]
    had_bar = any(isinstance(each, StepProgress) for each in trainer.callbacks)
    kept = [each for each in trainer.callbacks if not isinstance(each, _OF_TRAININGS)]
    kept += [TQDMProgressBar()] if had_bar and sys.stdout.isatty() else []
    trainer.callbacks = [*kept, GracefulStop()]


def forget_trainings() -> None:
    """Silence warnings that are meant for a training that is resumed."""
    for known in _ABOUT_TRAININGS:
        warnings.filterwarnings("ignore", known)
