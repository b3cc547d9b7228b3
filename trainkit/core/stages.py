"""How many micro-batches a window has at each stage of a training."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from trainkit.core.whole_number import check_whole_number, is_whole_number
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
        """Make stages from a mapping of starts to sizes, as a user wrote it.

        Raises:
            TrainkitError: the mapping is empty, does not begin at 0, or has a start or
                a size that is not a whole number.
        """
        if unit not in get_args(StageUnit):
            raise TrainkitError(
                f"AccumulationSchedule unit: must be one of "
                f"{list(get_args(StageUnit))}, received {unit!r}."
            )
        if not isinstance(sizes, Mapping) or not sizes:
            raise TrainkitError(
                f"AccumulationSchedule: must map a start to a window's size, received "
                f"{sizes!r}. {{0: 8, 10: 4}} means 8 micro-batches at first, and 4 "
                f"from {unit} 10 on."
            )
        for start, size in sizes.items():
            if not is_whole_number(start, least=0) or not is_whole_number(size):
                raise TrainkitError(
                    f"AccumulationSchedule: a start must be a whole number of at least "
                    f"0 and a size one of at least 1, received {{{start!r}: {size!r}}}."
                )
        if 0 not in sizes:
            raise TrainkitError(
                f"AccumulationSchedule: must have a size for the start of training, "
                f"and its first start is {min(sizes)}. Add 0: {{0: ..., "
                f"{min(sizes)}: ...}}."
            )
        starts = tuple(sorted(sizes))
        return cls(starts, tuple(sizes[start] for start in starts), unit)

    @classmethod
    def ramp(cls, start: int, end: int, over: int, unit: StageUnit) -> Stages:
        """Stages from one size to another by ones, evenly; the last begins at `over`.

        >>> Stages.ramp(1, 4, 9, "step").starts, Stages.ramp(1, 4, 9, "step").sizes
        ((0, 3, 6, 9), (1, 2, 3, 4))
        """
        for name, value in {"start": start, "end": end, "over": over}.items():
            check_whole_number(f"AccumulationSchedule.ramp {name}", value)
        distance = abs(end - start)
        direction = 1 if end > start else -1
        stages = {0: start}
        for i in range(1, distance + 1):
            # If there are more sizes than steps, a later one overwrites.
            stages[math.ceil(over * i / distance)] = start + direction * i
        return cls.make(stages, unit)

    @property
    def largest(self) -> int:
        return max(self.sizes)

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
        """How many optimizer steps a training takes.

        Args:
            num_batches: micro-batches in an epoch, on one rank.
            num_epochs: how many epochs.
            max_steps: the step at which training stops anyway.
            tokens: the mean weight of a micro-batch of all ranks together; needed if
                the stages count tokens.
        """
        if self.unit == "tokens" and tokens is None:
            raise TrainkitError(
                "AccumulationSchedule.total_steps: its stages begin at numbers of "
                "tokens, so it needs tokens_per_micro_batch=: the mean, for all ranks "
                "together."
            )
        steps, seen, seen_before = 0, 0.0, 0.0
        for epoch in range(num_epochs):
            left = num_batches
            while left > 0 and steps < max_steps:
                # Tokens are read one window late: see lit/schedule.
                position = {"epoch": epoch, "step": steps, "tokens": seen_before}
                taken = min(self.at(position[self.unit]), left)
                left -= taken
                steps += 1
                seen_before = seen
                seen += taken * (tokens or 0)
        return steps
