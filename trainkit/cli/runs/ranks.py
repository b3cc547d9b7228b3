"""The other ranks on this machine, which Lightning starts with this command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig

from trainkit.cli._compat import take_over_ranks
from trainkit.cli.errors import TrainingFailed
from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.words import quoted
from trainkit.errors import TrainkitError
from trainkit.lit._compat import starts_processes_for_fit

_MEETING = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")
_TO_END = 60.0
_TO_END_AFTER_AN_ERROR = 5.0
"""How many seconds the other ranks have to end after this one has ended."""


def make_repeatable(overrides: Sequence[str], folder: RunFolder) -> None:
    """Set the command line to one that starts this run alone, in this folder.

    Lightning starts the other ranks with it. The original command line starts every run
    of a multirun. In a process of a launcher, such as joblib, it is not trainkit's.
    """
    own = [*overrides, f"paths.run_dir={quoted(folder.path)}"]
    sys.argv[1:] = ["train", *dict.fromkeys(own)]
    if not HydraConfig.get().launcher._target_.endswith("BasicLauncher"):
        sys.argv[0] = str(Path(__file__).parents[2] / "__main__.py")
        sys.modules["__main__"].__spec__ = None  # Lightning would prefer it to argv


@contextmanager
def ranks_of_one_run(trainer: Any) -> Iterator[None]:
    """Wait for the other ranks at the end, and clean up for the next run.

    Lightning leaves the process group, and its address in the environment. With these
    the next job of a multirun would start no ranks, and talk to those that have ended.
    https://github.com/Lightning-AI/pytorch-lightning/issues/2727

    Raises:
        TrainkitError: the ranks are processes that live for `fit` alone.
        TrainingFailed: another rank failed after this one had ended.
    """
    if starts_processes_for_fit(trainer.strategy):
        raise TrainkitError(
            f"trainer.strategy: the ranks must stay until the summary is written, and "
            f"those of {type(trainer.strategy).__name__} with start_method="
            f"{trainer.strategy._start_method!r} end with fit, so nothing of it would "
            f"be known here. Write trainer.strategy=ddp."
        )
    before = {name: os.environ.get(name) for name in _MEETING}
    seconds = _TO_END_AFTER_AN_ERROR
    try:
        yield
        seconds = _TO_END
    finally:
        processes = take_over_ranks(trainer)
        if processes:
            codes = [_end_of(process, seconds) for process in processes]
            if dist.is_initialized():
                dist.destroy_process_group()
            _restore(before)
            if any(codes) and seconds == _TO_END:
                raise TrainingFailed(
                    f"trainkit: another rank failed; exit statuses: {codes}"
                )


def _end_of(process: subprocess.Popen[bytes], seconds: float) -> int:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _restore(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
