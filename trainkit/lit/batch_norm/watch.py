"""A record of the inputs that BatchNorm layers get."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

from trainkit.core.batch_norm.layers import BatchNorm


class ShapeWatch:
    """Records the shapes of layers' inputs until it is closed.

    Attributes:
        rows: for each layer, the fewest rows of one call.
        values: for each layer, how many values per channel a row gives it.
        totals: for each layer, the rows of all calls.
        calls: for each layer, the number of calls.
    """

    def __init__(self, layers: dict[str, BatchNorm]) -> None:
        self.rows: dict[str, int] = {}
        self.values: dict[str, float] = {}
        self.totals: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._handles = [
            layer.register_forward_pre_hook(self._hook(name), with_kwargs=True)
            for name, layer in layers.items()
        ]

    def num_parts(self, num_rows: int | None) -> int:
        """Into how many parts a batch of so many rows was cut before a layer.

        A split window may cut it, or the module itself. A layer whose calls add up to
        all rows has seen one part with each call.
        """
        cut = [self.calls[n] for n, total in self.totals.items() if total == num_rows]
        return max(cut, default=1)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, name: str) -> Any:
        def record(layer: Any, args: Any, kwargs: Any) -> None:
            x = args[0] if args else kwargs.get("input")
            if layer.training and isinstance(x, Tensor) and x.ndim >= 2:
                rows = x.shape[0]
                self.totals[name] += rows
                self.calls[name] += 1
                self.rows[name] = min(rows, self.rows.get(name, rows))
                per_channel = x.numel() / max(x.shape[1], 1)
                self.values[name] = per_channel / max(rows, 1)

        return record
