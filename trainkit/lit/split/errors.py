"""Errors of the user's code inside a window, and what is said of the cut there."""

from __future__ import annotations

from typing import Any

from trainkit.core.nested import describe
from trainkit.core.out_of_memory import is_out_of_memory
from trainkit.errors import TrainkitError
from trainkit.lit.split.micro_batches import CutBatch

MOST_SHOWN = 8


def stop_iteration(where: str) -> TrainkitError:
    """The error for a `StopIteration` inside an open window, by which Lightning would
    end the epoch."""
    return TrainkitError(
        f"{where}: it raised StopIteration inside a window, which Lightning takes for "
        f"the end of the epoch, so that the window's step would be lost without a "
        f"word. Look for a next() on an iterator that has ended; to end an epoch, "
        f"return -1 from on_train_batch_start."
    )


def add_note(error: Exception, loader_batch: Any, current: CutBatch) -> None:
    """Add a note to an error of the user's code: what the code got, and which option
    changes that.

    Trainkit's own errors name the cut themselves, and a shortage of memory does not
    come from sizes that do not match. Python 3.10 has no notes.
    """
    write = getattr(error, "add_note", None)
    if write is None or isinstance(error, TrainkitError) or is_out_of_memory(error):
        return
    try:
        text = _note(loader_batch, current)
    except Exception:  # a batch of the user's own class may raise anything
        return
    if text:
        write(text)


def _note(loader_batch: Any, current: CutBatch) -> str:
    part, number = current.parts[current.index], len(current.parts)
    shape, rows = describe(part.batch), ", ".join(map(str, part.rows[:MOST_SHOWN]))
    if number == 1 and shape == describe(loader_batch):
        return ""
    more = ", ..." if len(part.rows) > MOST_SHOWN else ""
    note = (
        f"trainkit | micro_batching: this was micro-batch {current.index + 1} of "
        f"{number}, the rows {rows}{more} of a loader batch of {current.num_rows} "
        f"rows: {shape}. MicroBatching(shared=...) names what every micro-batch is to "
        f"get whole."
    )
    if not current.trims:
        return note
    return (
        f"{note} Columns that are only padding in it were left out: trim=False keeps "
        f"them, and lengths= names the field with the lengths."
    )
