"""The id of the W&B run that belongs to a folder."""

from __future__ import annotations

import json
import os
import secrets
import string
from pathlib import Path

from trainkit.cli.runs.folder import RunFolder
from trainkit.errors import TrainkitError

FILE = "wandb_run.json"


def run_id(save_dir: str | None, wanted: str | None) -> str | None:
    """The id of the run to resume, or None for a new run.

    It is the wanted id, or else an agent's (`WANDB_RUN_ID`), or else the folder's.

    Raises:
        TrainkitError: the folder's file cannot be read.
    """
    return wanted or os.environ.get("WANDB_RUN_ID") or remembered(save_dir)


def remember(save_dir: str | None, run_id: str) -> None:
    """Save the id, so that the next run in this folder resumes this W&B run."""
    if save_dir is not None:
        RunFolder(save_dir).write(FILE, json.dumps({"id": run_id}) + "\n")


def remembered(save_dir: str | None) -> str | None:
    """The id of the folder's earlier run, or None."""
    if save_dir is None:
        return None
    path = Path(save_dir, FILE)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["id"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        found = None
    if not isinstance(found, str) or not found:
        raise TrainkitError(
            f"WandbRunLogger save_dir: {path} must hold the id of a W&B run, received "
            f"{path.read_text(errors='replace')[:80]!r}. Delete it to start a new run."
        )
    return found


def new_run_id() -> str:
    """A new id of eight letters and digits, as W&B makes them."""
    alphabet = string.ascii_lowercase + string.digits
    return "".join(secrets.choice(alphabet) for _ in range(8))
