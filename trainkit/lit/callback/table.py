"""The table before training: what a step will be, in a few lines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from tqdm import tqdm

Row = tuple[str, str]
"""A label and its text."""

wording: ContextVar[Callable[[str], str]] = ContextVar("wording", default=str)
"""How a command says what the library says in Python."""


def show(rows: list[Row]) -> None:
    """Print rows as lines, above the progress bar if there is one.

    >>> show([("step", "64 samples"), ("epoch", "97 windows")])
    trainkit | step: 64 samples
    trainkit | epoch: 97 windows

    Args:
        rows: of the table.
    """
    if sys.stdout is None:  # as under pythonw
        return
    for label, text in rows:
        # To the standard output as it is now: Ray's `print` passes it by.
        tqdm.write(f"trainkit | {label}: {wording.get()(text)}")
        sys.stdout.flush()


def say(trainer: Any, row: Row) -> None:
    """Print one more row while training runs, on the first rank.

    Args:
        trainer: in `fit`.
        row: a label and its text.
    """
    if trainer.is_global_zero:
        show([row])
