"""Which W&B run a folder belongs to."""

from __future__ import annotations

import json
import os
import secrets
import string
from collections.abc import Mapping
from pathlib import Path

from trainkit.errors import TrainkitError

FILE = "wandb_run.json"


def run_id(
    save_dir: str | None, wanted: str | None, *, environ: Mapping[str, str] = os.environ
) -> str | None:
    """The id of the run to resume, or None for a new run.

    What is wanted, or what an agent says (`WANDB_RUN_ID`), or the run that was in this
    folder before.

    Raises:
        TrainkitError: the folder's file cannot be read.
    """
    return wanted or environ.get("WANDB_RUN_ID") or remembered(save_dir)


def remember(save_dir: str | None, run_id: str) -> None:
    """Save the id, so that the next run in this folder resumes this W&B run."""
    if save_dir is None:
        return
    unfinished = Path(save_dir, f".{FILE}.{os.getpid()}")
    unfinished.write_text(json.dumps({"id": run_id}) + "\n", encoding="utf-8")
    unfinished.replace(Path(save_dir, FILE))


def remembered(save_dir: str | None) -> str | None:
    """The id of the run that was in this folder before, or None."""
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
    """Eight letters and digits, as W&B's own."""
    alphabet = string.ascii_lowercase + string.digits
    return "".join(secrets.choice(alphabet) for _ in range(8))
