"""The first windows of a training, from which their size can be measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from trainkit.core.batches import leading_dimension
from trainkit.core.window_stats import WindowStats
from trainkit.errors import TrainkitError

NUM_MEASURED = 8
"""Over how many windows a size is measured that no loader tells."""


def num_samples(batch: Any) -> float:
    """How many samples a batch holds; NaN where that cannot be told, which is said
    where somebody asks for the effective batch."""
    if isinstance(batch, list) and all(getattr(x, "ndim", 0) == 2 for x in batch):
        batch = tuple(batch)  # ids, mask and labels; only a strategy must know for sure
    try:
        return leading_dimension(batch)
    except TrainkitError:
        return math.nan


class FirstWindows:
    """What the first windows were; nothing is read before somebody asks.

    Attributes:
        loader_size: the batch size that the loader announces, if it does. What another
            loader's windows were is not carried over.
    """

    def __init__(self) -> None:
        self.loader_size: int | None = None
        self._seen: list[WindowStats] = []
        self._num_batches: list[Tensor | int] = []
        self._carried: Mapping[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """What has been measured, as plain numbers."""
        measured = FirstWindows()
        measured.loader_size = self.loader_size
        measured.load_state_dict(self.state_dict())
        return vars(measured)

    def __len__(self) -> int:
        return len(self._seen) + int(self._carried.get("windows", 0))

    @property
    def is_complete(self) -> bool:
        return len(self) >= NUM_MEASURED

    def add(self, stats: WindowStats, *, num_batches: int | None = None) -> None:
        """A window has closed.

        Args:
            stats: what it was.
            num_batches: how many loader batches it had, on all ranks. Default: as many
                as micro-batches.
        """
        if not self.is_complete:
            self._seen.append(stats)
            self._num_batches.append(num_batches or stats.num_micro_batches)

    def micro_batch(self, what: Literal["samples", "weight"]) -> float | None:
        """The mean `samples` or `weight` of a loader batch; waits for the device.

        None where no window has closed, or samples could not be counted in all.
        """
        total = self._total(what)
        return total / self._total("num_micro_batches") if total > 0 else None

    @property
    def num_weighty(self) -> int:
        """How many of them held anything that weighs; waits for the device."""
        return sum(bool(stats.weight > 0) for stats in self._seen)

    def _total(self, what: str) -> float:
        if what == "num_micro_batches":
            seen = sum(map(float, self._num_batches))
        else:
            seen = sum(float(getattr(stats, what)) for stats in self._seen)
        return seen + self._carried.get(what, 0.0)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on measuring with."""
        names = ("samples", "weight", "num_micro_batches")
        totals = {n: self._total(n) for n in names}
        return {"windows": len(self), "loader": self.loader_size, **totals}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("loader") == self.loader_size:
            self._carried = state
