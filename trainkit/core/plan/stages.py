"""How many micro-batches a window has at each stage of a training."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from trainkit.core.plan.options import (
    check_choice,
    check_whole_numbers,
    is_whole_number,
)
from trainkit.errors import TrainkitError

StageUnit = Literal["epoch", "step", "tokens"]


@dataclass(frozen=True)
class Stages:
    """The sizes of windows: each holds from its start on.

    >>> stages = Stages.make({0: 8, 10: 4, 20: 1})
    >>> [stages.at(epoch) for epoch in (0, 9, 10, 25)]
    [8, 8, 4, 1]

    Attributes:
        starts: where each stage begins, in epochs, optimizer steps or tokens.
        sizes: how many micro-batches its windows have.
        unit: what the starts count.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    unit: StageUnit = "epoch"

    @classmethod
    def make(cls, sizes: Mapping[int, int], unit: StageUnit = "epoch") -> Stages:
        """Make stages from a mapping of starts to sizes, as a user wrote it."""
        check_choice("AccumulationSchedule unit", unit, get_args(StageUnit))
        is_whole = isinstance(sizes, Mapping) and all(
            is_whole_number(start, least=0) and is_whole_number(size)
            for start, size in sizes.items()
        )
        if not is_whole or 0 not in sizes:
            raise TrainkitError(
                f"AccumulationSchedule: must map a start to a window's size, received "
                f"{sizes!r}. A start is a whole number of at least 0, a size one of at "
                f"least 1, and one start is 0: {{0: 8, 10: 4}} means 8 micro-batches "
                f"at first, and 4 from {unit} 10 on."
            )
        starts = tuple(sorted(sizes))
        return cls(starts, tuple(sizes[start] for start in starts), unit)

    @classmethod
    def ramp(cls, start: int, end: int, over: int, unit: StageUnit) -> Stages:
        """Stages from one size to another by ones, evenly; the last begins at `over`.

        >>> Stages.ramp(1, 4, 9, "step").starts, Stages.ramp(1, 4, 9, "step").sizes
        ((0, 3, 6, 9), (1, 2, 3, 4))
        """
        check_whole_numbers(
            "AccumulationSchedule.ramp", start=start, end=end, over=over
        )
        distance = abs(end - start)
        direction = 1 if end > start else -1
        stages = {0: start}
        for i in range(1, distance + 1):
            # If there are more sizes than steps, a later one overwrites.
            stages[math.ceil(over * i / distance)] = start + direction * i
        return cls.make(stages, unit)

    def at(self, position: float) -> int:
        """The size of a window that begins at a position."""
        return self.sizes[bisect.bisect_right(self.starts, position) - 1]

    def num_steps(
        self,
        num_batches: int,
        num_epochs: int,
        *,
        max_steps: float = math.inf,
        tokens: float | None = None,
    ) -> int:
        """How many optimizer steps a training takes, up to `max_steps`.

        An epoch has `num_batches` micro-batches on one rank; `tokens` is the mean
        weight of a micro-batch of all ranks together, needed if the stages count them.
        """
        if self.unit == "tokens" and tokens is None:
            raise TrainkitError(
                "AccumulationSchedule.total_steps: its stages begin at numbers of "
                "tokens, so it needs tokens_per_micro_batch=: the mean, for all ranks "
                "together."
            )
        step, seen, seen_before = 0, 0.0, 0.0
        for epoch in range(num_epochs):
            left = num_batches
            while left > 0 and step < max_steps:
                # Tokens are read one window late: see lit/schedule.
                position = {"epoch": epoch, "step": step, "tokens": seen_before}
                taken = min(self.at(position[self.unit]), left)
                left, step = left - taken, step + 1
                seen_before, seen = seen, seen + taken * (tokens or 0.0)
        return step


class WindowSize(int):
    """A number of micro-batches in a window, with the batch at which windows began.

    Lightning opens a window if `batch_idx % N == 0` and steps if
    `(batch_idx + 1) % N == 0`. With a plain number that is wrong after a change in
    mid-epoch: Lightning zeroes inside windows and steps with leftovers
    (Lightning-AI/pytorch-lightning#5334; yolov5#3722). A remainder by a `WindowSize`
    counts from the first window of its size. Otherwise it is a plain number.

    >>> size = WindowSize(3, first_batch=4)
    >>> [batch_idx % size for batch_idx in (4, 5, 6, 7)]
    [0, 1, 2, 0]
    >>> size == 3, 12 / size, f"{size}", size.was_divided_by
    (True, 4.0, '3', True)

    Attributes:
        first_batch: where a window of this size began.
        was_divided_by: whether somebody has computed a number of steps from it, as
            `trainer.estimated_stepping_batches` does.
    """

    first_batch: int
    was_divided_by: bool

    def __new__(cls, size: int, first_batch: int) -> WindowSize:
        self = super().__new__(cls, size)
        self.first_batch = first_batch
        self.was_divided_by = False
        return self

    # Python asks the right operand first where its type is a subclass of the left's.
    def __rmod__(self, batch_idx: int) -> int:
        return (batch_idx - self.first_batch) % int(self)

    def __rtruediv__(self, number: float) -> float:
        self.was_divided_by = True
        return number / int(self)

    def __reduce__(self) -> tuple[type[WindowSize], tuple[int, int]]:
        return WindowSize, (int(self), self.first_batch)
