"""The checkpoints of a run, damaged ones too, and the run that a word names."""

from __future__ import annotations

import traceback
import zipfile
from pathlib import Path
from typing import Any

import torch

from trainkit.cli.runs.folder import RunFolder
from trainkit.errors import TrainkitError, did_you_mean

BEST = "best.ckpt"


def best_checkpoint(folder: RunFolder) -> Path | None:
    """`best.ckpt`, or the best one that the newest one knows, or the newest one."""
    best = folder.checkpoints / BEST
    if best.exists():
        return best
    newest = folder.newest_checkpoint()
    if newest is None or newest.is_dir():
        return newest
    for state in (read_checkpoint(newest).get("callbacks") or {}).values():
        known = state.get("best_model_path") if isinstance(state, dict) else None
        best = folder.checkpoints / Path(str(known)).name
        if known and state.get("monitor") and best.exists():
            return best
    return newest


def step_of(path: Path) -> int | None:
    """The step that is saved in a checkpoint; None if it is sharded."""
    return None if path.is_dir() else read_checkpoint(path).get("global_step")


def read_checkpoint(path: Path | str, key: str = "checkpoint") -> dict[str, Any]:
    """The content of a checkpoint; of large ones the tensors stay in the file.

    Args:
        path: the file.
        key: what names it, for the message.

    Raises:
        TrainkitError: it is not a readable checkpoint of Lightning.
    """
    path = Path(path)
    try:
        # As Lightning loads it; the default of torch decides what may be in it.
        content = torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path))
        if isinstance(content, dict) and "state_dict" in content:
            return content
        why = "no state_dict, as checkpoints of Lightning have"
    except Exception as error:  # a file that was cut off, or something else
        why = type(error).__name__
    raise TrainkitError(
        f"{key}: must be a readable checkpoint, received {path}, which is damaged or "
        f"no checkpoint ({why}). Name another one; a run keeps them in its folder "
        f"checkpoints/. If it holds objects other than tensors and you trust it, set "
        f"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 in the environment."
    )


def does_not_fit(key: str, path: Path | str, error: BaseException) -> TrainkitError:
    """A short error in place of torch's, which may list every tensor."""
    if Path(path).is_file():
        try:
            read_checkpoint(path, key)
        except TrainkitError as unreadable:
            return unreadable
    lines = [line.strip() for line in str(error).splitlines()] or ["?"]
    more = f" (and {len(lines) - 2} more)" if len(lines) > 2 else ""
    return TrainkitError(
        f"{key}: {path} does not fit this configuration: {' '.join(lines[:2])}{more}\n"
        f"Undo what has changed since the run began: overrides, files in conf/, or the "
        f"code of the module; the run's config.yaml shows its values. To start a new "
        f"run, leave ckpt_path out."
    )


def was_restoring(error: BaseException) -> bool:
    """Whether Lightning raised the error while it restored a checkpoint."""
    return any(
        frame.f_globals.get("__name__", "").endswith(".checkpoint_connector")
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def find(verb: str, text: str) -> tuple[RunFolder, Path]:
    """The run and the checkpoint that a word of the command line names.

    Args:
        verb: `validate`, `test` or `predict`, for messages.
        text: the folder of a run, or a checkpoint in it.

    Raises:
        TrainkitError: nothing is there, or no run, or no checkpoint.
    """
    path = Path(text).expanduser().absolute()
    if not path.exists():
        near = did_you_mean(path.name, [each.name for each in path.parent.glob("*")])
        raise TrainkitError(
            f"trainkit {verb}: the first word must be the folder of a run or a "
            f"checkpoint, received {text!r}, which does not exist.{near} For example: "
            f"trainkit {verb} outputs/MyModule/2026-01-31_12-00-00-1a2b"
        )
    folder = RunFolder.around(path / RunFolder.OVERRIDES)
    if folder is None:
        below = sorted({file.parent for file in path.rglob(RunFolder.OVERRIDES)})
        runs = "".join(f"\n  {each}" for each in below[-5:])
        raise TrainkitError(
            f"trainkit {verb}: must be given one run of trainkit train or a checkpoint "
            f"in its folder, whose configuration it needs, and {path} is not in one "
            f"(with {RunFolder.OVERRIDES}). Of trainkit fit, give the files: trainkit "
            f"{verb} --config=RUN/config.yaml --ckpt_path=RUN/checkpoints/..."
            + (f" The last of {len(below)} below it:{runs}" if runs else "")
        )
    is_checkpoint = path.is_file() or path.suffix == ".ckpt"  # a folder if sharded
    named = path if is_checkpoint else best_checkpoint(folder)
    if named is None:
        raise TrainkitError(
            f"trainkit {verb}: the run must have a checkpoint, and {folder.checkpoints}"
            f" has none. A run writes its first one after 50 steps or at its end; with "
            f"trainer.enable_checkpointing=false it writes none."
        )
    return folder, named
