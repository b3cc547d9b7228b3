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

from trainkit.cli.loading import is_first_rank
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
    """Remove trainkit's files of a run that came to nothing, and emptied folders.

    Only a folder that was not there when the command began is looked at, and only if
    it has no checkpoint and no step, and no other process trains there.
    """
    folder = RunFolder(path)
    is_ours = folder.path in NewFolder.missing and is_first_rank()
    has_trained = folder.newest_checkpoint() or (folder.read_summary() or {}).get(
        "steps"
    )
    if not is_ours or has_trained:
        return
    with suppress(TrainkitError), only_one(folder.path, what="paths.run_dir"):
        for name in _OURS:
            shutil.rmtree(folder.path / name, ignore_errors=True)
            (folder.path / name).unlink(missing_ok=True)
    for each in (folder.checkpoints, *NewFolder.missing):
        with suppress(OSError):  # it is not empty, or not there
            each.rmdir()
