"""A note on an error inside a micro-batch: how its loader batch was cut."""

from __future__ import annotations

from typing import Any

from trainkit.core.nested import describe, take_apart
from trainkit.core.out_of_memory import is_out_of_memory
from trainkit.errors import TrainkitError
from trainkit.lit.split.micro_batches import CutBatch

MOST_SHOWN = 8


def add_note(error: Exception, loader_batch: Any, current: CutBatch) -> None:
    """Add a note to an error of the user's code: what the code got, and which option
    changes that.

    Trainkit's own errors name the cut themselves, and a shortage of memory does not
    come from sizes that do not match. Python 3.10 has no notes.

    Args:
        error: the error.
        loader_batch: the loader batch.
        current: its state.
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
    trimmed = _trimmed(loader_batch, part.batch)
    if number == 1 and not trimmed:
        return ""
    note = (
        f"trainkit | micro_batching: this was micro-batch {current.index + 1} of "
        f"{number}, the rows {_listed(part.rows)} of a loader batch of "
        f"{current.num_rows} rows: {describe(part.batch)}. MicroBatching(shared=...) "
        f"names what every micro-batch is to get whole."
    )
    if not trimmed:
        return note
    return (
        f"{note} Columns that are padding by the rows' lengths were left out "
        f"({_listed(trimmed)}): trim=False keeps them, and lengths= names the field "
        f"with the lengths."
    )


def _trimmed(loader_batch: Any, micro_batch: Any) -> list[str]:
    """The fields that have lost columns, each with its shapes before and after."""
    before, after = (
        {f.path: getattr(f.value, "shape", ()) for f in take_apart(batch)[0]}
        for batch in (loader_batch, micro_batch)
    )
    return [
        f"{path or 'the batch'} from {list(before[path][1:])} to {list(shape[1:])}"
        for path, shape in after.items()
        if path in before and tuple(before[path][1:]) != tuple(shape[1:])
    ]


def _listed(items: Any) -> str:
    shown = ", ".join(map(str, items[:MOST_SHOWN]))
    return shown + (", ..." if len(items) > MOST_SHOWN else "")
