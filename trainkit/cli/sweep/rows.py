"""The rows of an offline run, read back with W&B's own client."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainkit.cli.sweep.parameters import is_number
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
        for record in _records(file):
            if record.get("type") == "history":
                row = record["history"]["item"]
                rows[row.get("_step", len(rows))] = row
    return list(rows.values())


def metric_values(rows: list[dict[str, Any]], metric: str | None) -> list[float]:
    """The numbers that were logged as a metric, in order.

    >>> metric_values([{"loss": 2}, {"epoch": 1}, {"loss": "NaN"}], "loss")
    [2.0, nan]
    """
    found = (number(row[metric]) for row in rows if metric in row)
    return [value for value in found if value is not None]


def names_in(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names logged with numbers, without W&B's own columns.

    >>> names_in([{"_step": 0, "loss": 1.5}, {"loss": 1, "lr": "NaN", "kind": "a"}])
    ['loss', 'lr']
    """
    named = ((name, value) for row in rows for name, value in row.items())
    found = (n for n, value in named if n[:1] != "_" and number(value) is not None)
    return list(dict.fromkeys(found))


def number(value: Any) -> float | None:
    """A logged value as a number, also NaN and infinities; None if it is not one."""
    is_text = isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity")
    return float(value) if is_text or is_number(value) else None


def _records(file: Path) -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    # A file that is being written may end inside a record; the others count.
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    for line in done.stdout.splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def last_words(folder: Path) -> str:
    """The last line of a trial's output, without the lines of W&B's client."""
    text = (folder / "output.log").read_text(errors="replace")
    lines = [line.strip() for line in text.splitlines()]
    own = [line for line in lines if line and not line.startswith("wandb:")]
    return own[-1] if own else ""
