"""The rows of an offline run, read back with W&B's own client."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trainkit.cli.sweep.distributions import is_number
from trainkit.errors import TrainkitError

_SECONDS = 120
_FIRST_VERSION = (0, 31)


def check_client() -> None:
    """Refuse a client that cannot read offline runs.

    Raises:
        TrainkitError: wandb is older than 0.31.
    """
    installed = version("wandb")
    numbers = tuple(int(part) for part in installed.split(".")[:2])
    if numbers < _FIRST_VERSION:
        raise TrainkitError(
            f"trainkit sweep --offline: reads runs with `wandb leet inspect`, which "
            f"wandb has from 0.31, received {installed}. Run pip install -U wandb."
        )


def run_files(folder: Path, name: str) -> list[Path]:
    """The files of a run below a folder, the oldest first.

    A run that was resumed has several.
    """
    return sorted(folder.glob(f"wandb/*run-*-{name}/run-{name}.wandb"))


def read_run(files: list[Path]) -> tuple[list[dict[str, Any]], int | None]:
    """The rows that have been written so far, and the exit code or None.

    A resumed run repeats the steps after its checkpoint. Of several rows with one
    `_step` the last counts, as on the server.
    """
    rows: dict[Any, dict[str, Any]] = {}
    exit_code = None
    for file in files:
        exit_code = None
        for record in _records(file):
            if record.get("type") == "history":
                row = record["history"]["item"]
                rows[row.get("_step", len(rows))] = row
            elif record.get("type") == "exit":
                exit_code = int((record.get("exit") or {}).get("exit_code", 0))
    return list(rows.values()), exit_code


def metric_values(rows: list[dict[str, Any]], metric: str | None) -> list[float]:
    """The numbers that were logged as a metric, in order.

    >>> metric_values([{"loss": 2}, {"epoch": 1}, {"loss": "NaN"}], "loss")
    [2.0, nan]
    """
    found = (number(row[metric]) for row in rows if metric in row)
    return [value for value in found if value is not None]


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
