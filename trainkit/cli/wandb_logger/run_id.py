"""The id of the W&B run that belongs to a folder."""

from __future__ import annotations

import json
from pathlib import Path

from trainkit.cli.runs.folder import RunFolder
from trainkit.errors import TrainkitError

FILE = "wandb_run.json"


def remember(save_dir: str | None, run_id: str) -> None:
    """Save the id, so that the next run in this folder resumes this W&B run."""
    if save_dir is not None:
        RunFolder(save_dir).write_json(FILE, {"id": run_id})


def remembered(save_dir: str | None) -> str | None:
    """The id of the folder's earlier run, or None.

    Raises:
        TrainkitError: the folder's file cannot be read.
    """
    path = Path(save_dir or ".", FILE)
    if save_dir is None or not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["id"]
        if isinstance(found, str):
            return found
    except (ValueError, KeyError, TypeError):
        pass
    raise TrainkitError(
        f"WandbRunLogger save_dir: {path} must hold the id of a W&B run, received "
        f"{path.read_text(errors='replace')[:80]!r}. Delete it to start a new run."
    )
