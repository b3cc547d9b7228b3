"""The first windows of a training, from which their size can be measured."""

from __future__ import annotations

from typing import Literal

from trainkit.core.window import WindowStats

NUM_MEASURED = 8
"""Over how many windows a size is measured that no loader tells."""


class FirstWindows:
    """What the first windows were; nothing is read before somebody asks."""

    def __init__(self) -> None:
        self.seen: list[WindowStats] = []

    @property
    def is_complete(self) -> bool:
        return len(self.seen) >= NUM_MEASURED

    def add(self, stats: WindowStats) -> None:
        if not self.is_complete:
            self.seen.append(stats)

    def micro_batch(self, what: Literal["samples", "weight"]) -> float | None:
        """The mean `samples` or `weight` of a micro-batch; waits for the device.

        None where no window has closed, or samples could not be counted in all.
        """
        total = sum(float(getattr(stats, what)) for stats in self.seen)
        count = sum(int(stats.num_micro_batches) for stats in self.seen)
        return total / count if total > 0 else None
