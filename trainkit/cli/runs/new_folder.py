"""Removes what a refused training has written, and nothing else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainkit.cli.console import is_first_rank
from trainkit.cli.runs.folder import RunFolder, only_one
from trainkit.errors import TrainkitError

_OURS = {
    RunFolder.LOCK,
    RunFolder.CONFIG,
    RunFolder.OVERRIDES,
    RunFolder.SUMMARY,
    RunFolder.METRICS,
    RunFolder.LOG,
    RunFolder.REPORT,
    RunFolder.PICTURES,
}
"""What trainkit writes before the first step."""


class NewFolder(Callback):
    """Remembers what is there when a run begins.

    Attributes:
        path: the folder of the run; None while it is not known.
        missing: the folder if it was not there, and those above it that were not; the
            innermost first.
        names: of the files that were in the folder.
    """

    path: ClassVar[Path | None] = None
    missing: ClassVar[Sequence[Path]] = ()
    names: ClassVar[Collection[str]] = ()

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        NewFolder.path = None
        with suppress(OmegaConfBaseException):  # known only later: nothing is removed
            path = Path(os.path.abspath(str(OmegaConf.select(config, "hydra.run.dir"))))
            around = [path, *path.parents]
            is_there = [os.path.lexists(each) for each in around]
            NewFolder.path, NewFolder.missing = path, around[: is_there.index(True)]
            NewFolder.names = os.listdir(path) if path.is_dir() else ()


def remove_if_new(path: Path) -> None:
    """Remove trainkit's files of a run that came to nothing, and emptied folders.

    Only the folder of a run that has begun with this command is looked at, and only if
    it has no checkpoint and no step, and no other process trains there.
    """
    folder, names = RunFolder(path), NewFolder.names
    is_new = folder.path == NewFolder.path and RunFolder.OVERRIDES not in names
    summary = folder.read_summary()
    if not (is_new and is_first_rank()) or folder.newest_checkpoint():
        return
    if RunFolder.SUMMARY not in names and summary.get("steps"):
        return
    with suppress(TrainkitError), only_one(folder.path, what="paths.run_dir"):
        for name in _OURS.difference(names):
            shutil.rmtree(folder.path / name, ignore_errors=True)
            (folder.path / name).unlink(missing_ok=True)
    for each in (folder.checkpoints, *NewFolder.missing):
        with suppress(OSError):  # it is not empty, or not there
            each.rmdir()
