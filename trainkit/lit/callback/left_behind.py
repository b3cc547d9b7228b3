"""State of a callback after a `fit`: its numbers, and nothing that trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainkit.core.accumulator import Accumulator


def copied_without_fit(callback: Any) -> dict[str, Any]:
    """The attributes for a copy or a pickle of a window callback.

    What was said to it, and the numbers that it shows after a `fit`: a Trainer can be
    pickled with it, in a `fit` too, and a copy begins anew.
    """
    copied = object.__new__(type(callback))
    vars(copied).update(without_module(callback))
    copied._forget()
    copied._show_as(callback)
    return vars(copied)


def without_module(callback: Any) -> dict[str, Any]:
    """A callback's attributes without the module's logging methods, which Lightning
    gives to every callback in `fit`: with them a pickle would hold the module."""
    held = vars(callback).items()
    return {name: value for name, value in held if name not in ("log", "log_dict")}


def emptied(accumulators: Mapping[int, Accumulator]) -> dict[int, Accumulator]:
    """Accumulators that have closed as many windows, and hold no module."""
    empty = {}
    for index, closed in accumulators.items():
        empty[index] = Accumulator(closed.strategy, aggregation="none")
        empty[index].num_windows = closed.num_windows
    return empty
