"""Removes the folder that a refused training has made, and nothing else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.runs.only_one import FILE, only_one
from trainkit.errors import TrainkitError

_OURS = {
    FILE,
    RunFolder.CONFIG,
    RunFolder.OVERRIDES,
    RunFolder.SUMMARY,
    RunFolder.METRICS,
    RunFolder.LOG,
    RunFolder.RATE_PLAN,
    RunFolder.REPORT,
    RunFolder.PICTURES,
}
"""What trainkit writes before the first step."""


class NewFolder(Callback):
    """Remembers which folders are not there when a run begins.

    Attributes:
        missing: the run's folder, if it was not there, and those above it that were
            not; the innermost first.
    """

    missing: ClassVar[Sequence[Path]] = ()

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        NewFolder.missing = ()
        with suppress(OmegaConfBaseException):  # known only later: nothing is removed
            path = Path(os.path.abspath(str(OmegaConf.select(config, "hydra.run.dir"))))
            around = [path, *path.parents]
            is_there = [os.path.lexists(each) for each in around]
            NewFolder.missing = around[: is_there.index(True)]


def remove_if_new(path: Path) -> None:
    """Remove the folder of a run that came to nothing, and empty ones above it.

    Only folders that were not there when the command began are removed, and only if
    they have no other files than trainkit's own, no checkpoint and no step, and no
    other process trains there.
    """
    from lightning.fabric.utilities.rank_zero import rank_zero_only  # slow to load

    folder = RunFolder(path)
    is_ours = folder.path in NewFolder.missing and folder.path.is_dir()
    if not is_ours or getattr(rank_zero_only, "rank", 0) != 0:
        return
    names = {each.name for each in folder.path.iterdir()} - {RunFolder.CHECKPOINTS}
    saved = folder.checkpoints.is_dir() and any(folder.checkpoints.iterdir())
    if saved or names - _OURS or (folder.read_summary() or {}).get("steps"):
        return
    with suppress(TrainkitError), only_one(folder.path, what="paths.run_dir"):
        shutil.rmtree(folder.path, ignore_errors=True)
    with suppress(OSError):  # one that is not empty
        for parent in NewFolder.missing[1:]:
            parent.rmdir()
