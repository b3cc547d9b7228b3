"""How much training has seen: every window's weight and samples, added up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainkit.core.window_stats import WindowStats


class Seen:
    """Running totals over the windows of each optimizer.

    What a window holds has been reduced over ranks when it closes, so all ranks have
    the same totals. They stay on the device: adding a window waits for nothing.
    """

    def __init__(self) -> None:
        self._totals: dict[int, Tensor] = {}
        self._last: dict[int, WindowStats] = {}

    def __getstate__(self) -> dict[str, Any]:
        seen = Seen()
        seen.load_state_dict(self.state_dict())
        return vars(seen)

    def add(self, index: int, stats: WindowStats) -> None:
        """Count the window that an optimizer has closed; the same one only once."""
        if self._last.get(index) is stats:
            return
        self._last[index] = stats
        window = torch.stack([stats.weight, stats.samples])
        before = self._totals.get(index)
        self._totals[index] = window if before is None else before.to(window) + window

    def numbers(self, index: int) -> dict[str, Tensor]:
        """`seen`, in the strategy's unit, and `samples_seen`.

        The latter is NaN from the first window whose samples cannot be counted.
        """
        weight, samples = self._totals[index].unbind()
        return {"seen": weight, "samples_seen": samples}

    def state_dict(self) -> dict[int, list[float]]:
        return {index: total.tolist() for index, total in self._totals.items()}

    def load_state_dict(self, state: Mapping[int, Any]) -> None:
        self._last.clear()
        self._totals = {
            index: torch.tensor(total, dtype=torch.float64)
            for index, total in state.items()
        }
