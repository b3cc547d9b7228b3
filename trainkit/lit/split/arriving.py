"""A check that micro-batches weigh on the device what they weighed on the host."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainkit.core.accumulator import Accumulator
from trainkit.core.checks import LateReading
from trainkit.core.strategies import Weight
from trainkit.core.window import vector
from trainkit.errors import TrainkitError
from trainkit.lit.split import refusals

ROUNDED = 1e-2
"""The tolerance for a weight that may be cast to a narrow dtype; a count is exact."""


class _Compared(NamedTuple):
    term: str
    expected: Weight
    arrived: Weight
    tolerance: float


class Arrivals:
    """Weighs micro-batches again after the user's hooks of the transfer.

    Labels that are made or masked on the device are too late for a total that is known
    beforehand. Numbers on the host are compared at once. Numbers on a device are read
    when a later window runs, so that nothing waits; but in the first window, and with
    `checks="now"`, they are read at once too.

    Args:
        accumulator: has the windows of the micro-batches.
    """

    def __init__(self, accumulator: Accumulator) -> None:
        self._accumulator = accumulator
        self._of_window: list[_Compared] = []
        self._waiting: deque[tuple[int, list[str], LateReading]] = deque()
        self._is_first = True

    def begin(self) -> None:
        """Begin a loader batch, or repeat it after memory ran out."""
        self._of_window = []
        while self._waiting and self._waiting[0][2].arrived:
            self._read_next()

    def check(self, weights: Mapping[str, Weight], on_device: Any) -> None:
        """Compare the weight of a micro-batch that has arrived.

        Args:
            weights: its weights on the host, by term.
            on_device: the micro-batch as `training_step` will get it.
        """
        waits = self._is_first or self._accumulator.watch.checks == "now"
        for term, strategy in self._accumulator.strategies.items():
            try:
                arrived = strategy.weight(on_device)
            except (TrainkitError, LookupError, TypeError, AttributeError):
                continue  # changed in structure, but perhaps right
            tolerance = 0.0 if _is_count(arrived) else ROUNDED
            each = _Compared(term, weights[term], arrived, tolerance)
            if waits or (is_on_host(each.expected) and is_on_host(arrived)):
                pair = float(each.expected), float(arrived)
                self._compare(self._step, term, *pair, tolerance, is_late=False)
            else:
                self._of_window.append(each)

    def end(self) -> None:
        """End a loader batch, of which all micro-batches have run."""
        self._is_first = False
        if not self._of_window:
            return
        terms, *columns = zip(*self._of_window, strict=True)
        expected, arrived, _ = columns
        device = next(w.device for w in (*arrived, *expected) if isinstance(w, Tensor))
        rows = [vector(column, device) for column in columns]
        reading = LateReading(torch.stack(rows))
        self._waiting.append((self._step, list(terms), reading))

    def read_all(self) -> None:
        """Compare the weights of all windows so far; the host waits for the last."""
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
        expected: float,
        arrived: float,
        tolerance: float,
        *,
        is_late: bool,
    ) -> None:
        tolerance = max(tolerance, 1e-9)
        if not math.isclose(expected, arrived, rel_tol=tolerance, abs_tol=1e-9):
            name = type(self._accumulator.strategies[term]).__name__
            raise refusals.other_weight(step, name, expected, arrived, is_late=is_late)


def is_on_host(weight: Weight) -> bool:
    """Whether its value can be read without waiting."""
    return not isinstance(weight, Tensor) or weight.is_cpu


def _is_count(weight: Weight) -> bool:
    if isinstance(weight, Tensor):
        return not weight.is_floating_point()
    return isinstance(weight, int)
