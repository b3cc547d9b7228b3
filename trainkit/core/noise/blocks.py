"""Sums over the last measured windows, in blocks of windows that follow each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainkit.core.noise.estimate import COLUMNS

BLOCKS = 20
"""When so many are full, pairs become one, or the oldest goes."""


class Blocks:
    """Sums over the last windows in ten to twenty blocks of equally many.

    The first windows have a block each. When there are twenty blocks, two become one,
    until a block holds as many windows as it may; from then on the oldest block goes.

    A window's gradient is measured in units of the gradients before it. Otherwise the
    long ones at the beginning of a training would outweigh all later ones. What came
    before does not depend on the window's own noise, so this adds no bias.

    Args:
        last: over how many windows, at most.

    Attributes:
        table: a row of `COLUMNS` for each block, on the device.
        num_windows: how many windows were added.
    """

    def __init__(self, last: int) -> None:
        self._largest = max(last // BLOCKS, 1)
        self.table: Tensor | None = None
        self.num_windows = 0
        self._each, self._in_newest = 1, 0
        self._unit: Tensor | None = None  # |S|^2 / W^2 of the windows before

    def add(self, window: Tensor) -> None:
        """Add the sums of a window."""
        self.num_windows += 1
        window = self._in_units(window)
        if self.table is None:
            self.table, self._in_newest = window[None], 1
        elif self._in_newest < self._each:
            self.table = torch.cat([self.table[:-1], (self.table[-1] + window)[None]])
            self._in_newest += 1
        else:
            self.table = torch.cat([self._with_room(self.table), window[None]])
            self._in_newest = 1

    def _in_units(self, window: Tensor) -> Tensor:
        own = window[0] / window[2]
        unit = own if self._unit is None else self._unit.to(own)
        unit = torch.where(unit > 0, unit, own)
        self._unit = torch.where(own.isfinite(), unit + (own - unit) / 4, unit)
        window = window.clone()
        window[:2] = torch.where(window[:2] > 0, window[:2] / unit, 0.0)
        return window

    def _with_room(self, table: Tensor) -> Tensor:
        if len(table) < BLOCKS:
            return table
        if 2 * self._each > self._largest:
            return table[1:]
        self._each *= 2
        return table.view(-1, 2, len(COLUMNS)).sum(1)

    def state_dict(self) -> dict[str, Any]:
        """The sums, for a checkpoint; waits for the device."""
        return {
            "table": None if self.table is None else self.table.cpu(),
            "unit": None if self._unit is None else self._unit.cpu(),
            "num_windows": self.num_windows,
            "each": self._each,
            "in_newest": self._in_newest,
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Resume from saved sums."""
        saved = state["table"]
        self.table = None if saved is None else saved.to(device)
        self._unit = state["unit"]
        self.num_windows = state["num_windows"]
        self._each, self._in_newest = state["each"], state["in_newest"]
