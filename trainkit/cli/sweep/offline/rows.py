"""What a trial has written: its rows, read with W&B's own client, and its output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from trainkit.cli.sweep.trial import Trial

_SECONDS = 120


def read_rows(trial: Trial) -> list[dict[str, Any]]:
    """The rows that a trial has written so far.

    A resumed trial has several files, and repeats the steps after its checkpoint. Of
    several rows with one `_step` the last counts, as on the server.
    """
    rows: dict[Any, dict[str, Any]] = {}
    files = f"wandb/*run-*-{trial.name}/run-{trial.name}.wandb"
    for file in sorted(Path(trial.folder).glob(files)):
        words = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,  # a file that is being written may end inside a record
            stdin=subprocess.DEVNULL,
        )
        for line in done.stdout.splitlines():
            try:
                row = json.loads(line)["history"]["item"]
            except (json.JSONDecodeError, KeyError):
                continue
            rows[row.get("_step", len(rows))] = row
    return list(rows.values())


def last_words(trial: Trial) -> str:
    """The last line of a trial's output, without the lines of W&B's client."""
    text = Path(trial.folder, "output.log").read_text(errors="replace")
    lines = [line.strip() for line in text.splitlines()]
    own = [line for line in lines if line and not line.startswith("wandb:")]
    return own[-1] if own else ""
