"""What is to be evaluated: the folder of a run, and the checkpoint in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainkit.cli.runs.checkpoint import Checkpoint, about_checkpoint, best_checkpoint
from trainkit.cli.runs.folder import RunFolder
from trainkit.errors import TrainkitError, did_you_mean


@dataclass(frozen=True)
class Place:
    """A run and a checkpoint of it.

    Args:
        folder: of the run.
        config: the configuration that `trainkit fit` has saved; None for `train`.
        checkpoint: the checkpoint.
    """

    folder: RunFolder
    config: Path | None
    checkpoint: Checkpoint


def find(verb: str, text: str) -> Place:
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
    run = next((each for each in (path, *path.parents) if _is_run(each)), None)
    if run is None:
        below = sorted({file.parent for file in path.rglob(RunFolder.OVERRIDES)})
        runs = "".join(f"\n  {each}" for each in below[-5:])
        raise TrainkitError(
            f"trainkit {verb}: must be given one run or a checkpoint in its folder, "
            f"whose configuration it needs, and {path} is not in one (with "
            f"{RunFolder.OVERRIDES}, or the config.yaml of trainkit fit)."
            + (f" The last of {len(below)} below it:{runs}" if runs else "")
        )
    folder = RunFolder(run)
    is_checkpoint = path.is_file() or path.suffix == ".ckpt"  # a folder if sharded
    named = path if is_checkpoint else best_checkpoint(folder)
    if named is None:
        raise TrainkitError(
            f"trainkit {verb}: the run must have a checkpoint, and {folder.checkpoints}"
            f" has none. A run writes its first one after 50 steps or at its end; with "
            f"trainer.enable_checkpointing=false it writes none."
        )
    config = None if folder.is_of_a_run() else _config_of_fit(run)
    return Place(folder, config, about_checkpoint(named, folder))


def _is_run(path: Path) -> bool:
    return RunFolder(path).is_of_a_run() or _config_of_fit(path) is not None


def _config_of_fit(path: Path) -> Path | None:
    """The newest configuration that `trainkit fit` has saved in a folder, or None."""
    if not (path / RunFolder.CHECKPOINTS).is_dir():
        return None
    found = [*path.glob("config-v*.yaml"), *path.glob("config.yaml")]
    newest_first = sorted(found, key=lambda each: each.stat().st_mtime, reverse=True)
    return next(filter(_describes_a_fit, newest_first), None)


def _describes_a_fit(path: Path) -> bool:
    try:
        content: Any = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return False
    return isinstance(content, dict) and "trainer" in content
