"""What is to be evaluated: the folder of a run, and the checkpoint in it."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainkit.cli.runs.checkpoint import Checkpoint, about_checkpoint, best_checkpoint
from trainkit.cli.runs.folder import RunFolder
from trainkit.errors import TrainkitError

_SHOWN = 5
"""The number of runs that a message lists."""


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
        text: the folder of a run, a folder above one run, or a checkpoint.

    Raises:
        TrainkitError: nothing is there, or several runs, or no checkpoint.
    """
    path = Path(text).expanduser().absolute()
    if not path.exists():
        raise _absent(verb, text, path)
    around = [path, *path.parents]
    run = next((each for each in around if _is_run(each)), None)
    if run is None and path.is_dir():
        run = _only_run_below(verb, path)
    if run is None:
        raise TrainkitError(
            f"trainkit {verb}: a checkpoint needs the configuration of its run, and "
            f"{path} is not in the folder of one (with {RunFolder.OVERRIDES}, or the "
            f"config.yaml of trainkit fit). Put it into checkpoints/ of its run, or "
            f"use the Lightning CLI: trainkit {verb} --config=... --ckpt_path={text}"
        )
    folder = RunFolder(run)
    named = path if path.is_file() or _is_sharded(path) else best_checkpoint(folder)
    if named is None:
        raise TrainkitError(
            f"trainkit {verb}: the run must have a checkpoint, and {folder.checkpoints}"
            f" has none. A run writes its first one after 50 steps or at its end; with "
            f"trainer.enable_checkpointing=false it writes none."
        )
    config = None if folder.is_of_a_run() else _config_of_fit(run)
    return Place(folder, config, about_checkpoint(named))


def _is_run(path: Path) -> bool:
    return RunFolder(path).is_of_a_run() or _config_of_fit(path) is not None


def _is_sharded(path: Path) -> bool:
    return path.suffix == ".ckpt"


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


def _only_run_below(verb: str, path: Path) -> Path:
    files = [*path.rglob(RunFolder.OVERRIDES), *path.rglob("config*.yaml")]
    runs = [each for each in {file.parent for file in files} if _is_run(each)]
    if len(runs) == 1:
        return runs[0]
    if not runs:
        raise TrainkitError(
            f"trainkit {verb}: must be given a run or a checkpoint, and there is no run"
            f" in {path}. trainkit train ends with the name of its folder."
        )
    runs.sort(key=_begun, reverse=True)
    lines = [f"  {each}{_metric_of(each)}" for each in runs[:_SHOWN]]
    others = len(runs) - _SHOWN
    lines += [f"  and {others} more"] if others > 0 else []
    raise TrainkitError(
        f"trainkit {verb}: must be given one run, and there are {len(runs)} in {path}. "
        f"Name one; the newest come first:\n" + "\n".join(lines)
    )


def _begun(run: Path) -> float:
    file = run / RunFolder.OVERRIDES
    return (file if file.is_file() else run).stat().st_mtime


def _metric_of(run: Path) -> str:
    try:
        summary = RunFolder(run).read_summary() or {}
    except json.JSONDecodeError:
        return ""
    name = summary.get("metric")
    value = (summary.get("metrics") or {}).get(name)
    return "" if value is None else f"  {name} {value:.4g}"


def _absent(verb: str, text: str, path: Path) -> TrainkitError:
    if text.startswith("ckpt_path="):
        return TrainkitError(
            f"trainkit {verb}: the first word must be the folder of a run or a "
            f"checkpoint, without ckpt_path=, received {text!r}. trainkit {verb} RUN "
            f"takes its best checkpoint; for the last: RUN/checkpoints/last.ckpt"
        )
    if "=" in text and not text.endswith(".ckpt"):
        return TrainkitError(
            f"trainkit {verb}: the first word must be the folder of a run or a "
            f"checkpoint, received {text!r}. For example: trainkit {verb} "
            f"outputs/MyModule/2026-01-31_12-00-00-1a2b {text}"
        )
    there = next(each for each in path.parents if each.is_dir())
    missing = path.relative_to(there).parts[0]
    names = sorted(each.name for each in there.iterdir())
    close = difflib.get_close_matches(missing, names, n=3, cutoff=0.5)
    near = ", ".join(str(there / name) for name in close)
    return TrainkitError(
        f"trainkit {verb}: must be given the folder of a run or a checkpoint, received "
        f"{text!r}, which does not exist: {there} has no {missing!r}. "
        + (f"Near it: {near}." if close else "trainkit train ends with that name.")
    )
