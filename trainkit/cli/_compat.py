"""The private names of Lightning and wandb that the command cannot do without."""

from __future__ import annotations

import subprocess
from typing import Any


def run_of(logger: Any) -> Any:
    """The W&B run that a `WandbLogger` has made, or None; its public `experiment` would
    make one."""
    return logger._experiment


def set_run(logger: Any, run: Any) -> None:
    """Set the run of a `WandbLogger`; its constructor takes one, but too early."""
    logger._experiment = run


def is_attached(logger: Any) -> bool:
    """Whether a `WandbLogger` came to this process by pickle, with another's run."""
    return getattr(logger, "_attach_id", None) is not None


def is_finished(run: Any) -> bool:
    """Whether a W&B run is finished, so that logging to it would raise."""
    return getattr(run, "_is_finished", False)


def take_over_ranks(trainer: Any) -> list[subprocess.Popen[bytes]]:
    """The ranks that Lightning has started as processes of their own.

    It no longer watches them: it would kill this process with SIGKILL as soon as it
    sees one that has not ended well, even where this one has a summary to write.
    """
    watched = getattr(trainer.strategy.launcher, "procs", [])
    processes = list(watched)
    watched.clear()
    return processes
