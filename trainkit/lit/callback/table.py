"""The table before training: what a step will be, in a few lines."""

from __future__ import annotations

import sys
from typing import Any

Row = tuple[str, str]
"""A label and its text."""


def show(rows: list[Row]) -> None:
    """Print once: a table where there is a terminal, plain lines where there is none.

    >>> show([("step", "64 samples"), ("epoch", "97 windows")])
    trainkit | step: 64 samples
    trainkit | epoch: 97 windows
    """
    if not rows:
        return
    isatty = getattr(sys.stdout, "isatty", None)  # there may be no standard output
    if isatty is None or not isatty():
        for label, text in rows:
            print(f"trainkit | {label}: {text}", flush=True)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title="trainkit", title_justify="left", show_header=False)
    for label, text in rows:
        table.add_row(label, Text(text))  # brackets are no markup
    Console().print(table)


def say(trainer: Any, row: Row) -> None:
    """Print one more row while training runs, above the progress bar if there is one.

    Args:
        trainer: in `fit`.
        row: a label and its text.
    """
    line = f"trainkit | {row[0]}: {row[1]}"
    bar = trainer.progress_bar_callback
    if bar is None or not getattr(bar, "is_enabled", True):
        print(line, flush=True)
        return
    if any(cls.__name__ == "RichProgressBar" for cls in type(bar).__mro__):
        line = line.replace("[", "\\[")  # brackets are no markup
    bar.print(line)
