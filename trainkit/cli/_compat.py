"""The private names of Lightning and wandb that the command cannot do without."""

from __future__ import annotations

import subprocess
from typing import Any


def run_of(logger: Any) -> Any:
    """The W&B run of a `WandbLogger`, or None. Its public `experiment` starts a run."""
    return logger._experiment


def without_run(logger: Any) -> dict[str, Any]:
    """Let a `WandbLogger` open a run at its next use.

    Returns:
        what it will give to `wandb.init`; changes hold.
    """
    logger._experiment = None
    return logger._wandb_init


def is_finished(run: Any) -> bool:
    """Whether a W&B run is finished, so that logging to it would raise."""
    return getattr(run, "_is_finished", False)


def take_over_ranks(trainer: Any) -> list[subprocess.Popen[bytes]]:
    """The processes that Lightning has started for other ranks; it stops watching them.

    Otherwise it kills this process with SIGKILL as soon as one of them fails, even if
    this process still has a summary to write.
    """
    watched = getattr(trainer.strategy.launcher, "procs", [])
    processes = list(watched)
    watched.clear()
    return processes
