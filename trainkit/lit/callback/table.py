"""The table before training: what a step will be, in a few lines."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

Row = tuple[str, str]
"""A label and its text."""

wording: ContextVar[Callable[[str], str]] = ContextVar("wording", default=str)
"""How a command says what the library says in Python."""


def show(rows: list[Row], trainer: Any = None) -> None:
    """Print once: a table where there is a terminal, plain lines where there is none.

    Args:
        rows: of the table.
        trainer: in `fit`, whose progress bar stays below the table.

    >>> show([("step", "64 samples"), ("epoch", "97 windows")])
    trainkit | step: 64 samples
    trainkit | epoch: 97 windows
    """
    if not rows:
        return
    rows = [(label, wording.get()(text)) for label, text in rows]
    if not is_terminal():
        for label, text in rows:
            _print(f"trainkit | {label}: {text}", trainer)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title="trainkit", title_justify="left", show_header=False)
    for label, text in rows:
        table.add_row(label, Text(text))  # brackets are no markup
    console = Console()
    with console.capture() as drawn:
        console.print(table)
    _print(drawn.get().removesuffix("\n"), trainer)


def say(trainer: Any, row: Row) -> None:
    """Print one more row while training runs, above the progress bar if there is one.

    Args:
        trainer: in `fit`.
        row: a label and its text.
    """
    line = f"trainkit | {row[0]}: {wording.get()(row[1])}"
    if is_terminal():  # which would cut words
        width = shutil.get_terminal_size().columns
        line = textwrap.fill(
            line,
            width,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    _print(line, trainer)


def is_terminal() -> bool:
    """Whether the standard output is a terminal; there may be none at all."""
    isatty = getattr(sys.stdout, "isatty", None)
    return isatty is not None and isatty()


def _print(text: str, trainer: Any) -> None:
    bar = None if trainer is None else trainer.progress_bar_callback
    if bar is None or not getattr(bar, "is_enabled", True) or _is_before_tqdm(bar):
        _write(f"{text}\n")
    else:
        bar.print(text)


def _write(text: str) -> None:
    """Write to the standard output as it is now: Ray's `print` passes it by."""
    if sys.stdout is not None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _is_before_tqdm(bar: Any) -> bool:
    """Whether it is a bar of tqdm that is not drawn yet: its `print` does nothing."""
    if all(cls.__name__ != "TQDMProgressBar" for cls in type(bar).__mro__):
        return False
    try:
        return bar.train_progress_bar.disable
    except TypeError:  # Lightning's: there is none yet
        return True


def clipping(trainer: Any) -> list[Row]:
    """What the Trainer clips, as a row of the table."""
    limit = trainer.gradient_clip_val
    if not limit:
        return []
    how = "entries" if trainer.gradient_clip_algorithm == "value" else "a norm"
    return [
        ("clipping", f"gradients above {how} of {limit:g} (trainer.gradient_clip_val)")
    ]


def resumed(trainer: Any) -> list[Row]:
    """The checkpoint from which a run resumes, as the last row of the table."""
    if trainer.ckpt_path is None:
        return []
    of, path = "from", Path(trainer.ckpt_path)
    if path.parent.name == "checkpoints":  # Lightning's place, and ours
        of, path = "of", path.parents[1]
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    is_url = "://" in str(trainer.ckpt_path)
    where = f"from {trainer.ckpt_path}" if is_url else f"{of} {path}"
    return [("training", f"resumed at step {trainer.global_step:,} {where}")]
