"""A check that micro-batches weigh on the device what they weighed on the host."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainkit.core.accumulator import Accumulator
from trainkit.core.late_reading import LateReading
from trainkit.core.strategies import Weight
from trainkit.core.totals import vector
from trainkit.errors import TrainkitError
from trainkit.lit.split import refusals

ROUNDED = 1e-2
"""What is cast to a narrow dtype on the way is rounded; a count is not."""


class _Compared(NamedTuple):
    term: str
    told: Weight
    arrived: Weight
    tolerance: float


class Arrivals:
    """Weighs micro-batches once more, behind the user's hooks on their way.

    Labels that are made or masked on the device are too late for a total that is known
    beforehand. Numbers on the host are compared at once. What is on a device is read
    when a later window runs, so that nothing waits; in the first window, and with
    `checks="now"`, at once as well.

    Args:
        accumulator: whose windows the micro-batches make.
    """

    def __init__(self, accumulator: Accumulator) -> None:
        self._accumulator = accumulator
        self._of_window: list[_Compared] = []
        self._waiting: deque[tuple[int, list[str], LateReading]] = deque()
        self._is_first = True

    def begin(self) -> None:
        """A loader batch is about to run, perhaps once more."""
        self._of_window = []
        while self._waiting and self._waiting[0][2].arrived:
            self._read_next()

    def look_at(self, weights: Mapping[str, Weight], on_device: Any) -> None:
        """A micro-batch has arrived.

        Args:
            weights: what it weighed on the host, by term.
            on_device: what `training_step` is about to get.
        """
        waits = self._is_first or self._accumulator.watch.checks == "now"
        for term, strategy in self._accumulator.strategies.items():
            try:
                arrived = strategy.weight(on_device)
            except (TrainkitError, LookupError, TypeError, AttributeError):
                continue  # it has become something else; nothing is known to be wrong
            tolerance = 0.0 if _is_count(arrived) else ROUNDED
            each = _Compared(term, weights[term], arrived, tolerance)
            if waits or (is_on_host(each.told) and is_on_host(arrived)):
                told, found = float(each.told), float(arrived)
                self._compare(self._step, term, told, found, tolerance, is_late=False)
            else:
                self._of_window.append(each)

    def end(self) -> None:
        """All micro-batches of the loader batch have run."""
        self._is_first = False
        if not self._of_window:
            return
        terms, told, arrived, tolerances = zip(*self._of_window, strict=True)
        device = next(w.device for w in (*arrived, *told) if isinstance(w, Tensor))
        rows = [vector(row, device) for row in (told, arrived, tolerances)]
        reading = LateReading(torch.stack(rows))
        self._waiting.append((self._step, list(terms), reading))

    def read_all(self) -> None:
        """Look at all windows so far; the host waits for the last."""
        while self._waiting:
            self._read_next()

    @property
    def _step(self) -> int:
        return self._accumulator.num_windows

    def _read_next(self) -> None:
        step, terms, reading = self._waiting.popleft()
        for term, *numbers in zip(terms, *reading.values(), strict=True):
            self._compare(step, term, *numbers, is_late=True)

    def _compare(
        self,
        step: int,
        term: str,
        told: float,
        arrived: float,
        tolerance: float,
        *,
        is_late: bool,
    ) -> None:
        if not math.isclose(told, arrived, rel_tol=max(tolerance, 1e-9), abs_tol=1e-9):
            name = type(self._accumulator.strategies[term]).__name__
            raise refusals.other_weight(step, name, told, arrived, is_late=is_late)


def is_on_host(weight: Weight) -> bool:
    """Whether its value can be read without waiting."""
    return not isinstance(weight, Tensor) or weight.is_cpu


def _is_count(weight: Weight) -> bool:
    if isinstance(weight, Tensor):
        return not weight.is_floating_point()
    return isinstance(weight, int)
