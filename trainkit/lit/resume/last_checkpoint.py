"""The file `last.ckpt`: complete at every moment, and what stands in its way."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainkit.errors import TrainkitError
from trainkit.lit.callback.base import has_callback


def save_atomically(trainer: Any, path: Path) -> None:
    """Write a checkpoint that exists completely or not at all.

    Lightning writes it in the system's temporary folder and moves it. If that is
    another file system, moving is copying, and a killed process leaves a part of it.
    """
    part = path.with_name(path.name + ".part")
    try:
        trainer.save_checkpoint(part, weights_only=False)
    except OSError:
        if trainer.is_global_zero:
            _remove(part)  # it takes room that others need
        raise
    if trainer.is_global_zero:
        if not part.exists():
            raise TrainkitError(
                f"ExactResume: a checkpoint must be written when it has been saved, "
                f"and {part} is not there. Leave out AsyncCheckpointIO and the like."
            )
        _put_in_place(part, path)
    trainer.strategy.barrier("trainkit.save_atomically")


def _put_in_place(part: Path, path: Path) -> None:
    if not path.is_dir() and not (path.exists() and part.is_dir()):
        os.replace(part, path)
        return
    # Sharded checkpoints are folders, which no system replaces in one step.
    old = path.with_name(path.name + ".old")
    _remove(old)
    os.replace(path, old)
    os.replace(part, path)
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def refuse_same_file(savers: list[Any], path: Path) -> None:
    """Refuse another callback that writes `last.ckpt` to the same folder."""
    for saver in savers:
        folder, of_last = (
            getattr(saver, name, None) for name in ("dirpath", "CHECKPOINT_NAME_LAST")
        )
        keeps_last = bool(getattr(saver, "save_last", False)) and of_last == path.stem
        writes_last = keeps_last or getattr(saver, "filename", None) == path.stem
        if folder is None or not writes_last:
            continue
        if os.path.realpath(folder) == os.path.realpath(path.parent):
            raise TrainkitError(
                f"ExactResume: only one callback may write {path}, and "
                f"{type(saver).__name__} writes it too. Leave save_last out there, or "
                f"give one of the two another dirpath."
            )


def missing_places(trainer: Any, path: Path, *, is_chosen: bool) -> Iterator[str]:
    """What the next start will not find.

    Args:
        trainer: in `fit`.
        path: of `last.ckpt`.
        is_chosen: whether the user has chosen its folder.
    """
    loggers = trainer.loggers
    if not is_chosen and loggers and isinstance(loggers[0].version, int):
        yield (
            f"last.ckpt stands in {path.parent}, and {type(loggers[0]).__name__} "
            f"numbers a new folder at each start, in which ckpt_path='last' finds "
            f"nothing. Pass ExactResume(dirpath=...), or give the logger a version."
        )
    if trainer.ckpt_path is None and path.exists():
        yield (
            f"the run begins anew, and will replace {path}, which an earlier run has "
            f"left. Pass ckpt_path={str(path)!r} to fit in order to resume that run, "
            f"or another dirpath to keep it."
        )
    if has_callback(loggers, "CSVLogger"):
        yield (
            "a CSVLogger begins its file anew when a run is resumed, so the earlier "
            "rows are lost. Use trainkit.MetricsCSVLogger."
        )
