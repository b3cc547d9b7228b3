"""What BatchNorm layers really see, in the first window."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

from trainkit.core.batch_norm.layers import BatchNorm


class ShapeWatch:
    """Looks at layers' inputs until it is closed.

    Attributes:
        rows: the fewest rows that a layer has seen at once.
        values: for each layer, how many values per channel a row gives it.
        totals: how many rows each layer has seen in all.
        calls: how many times it was called.
    """

    def __init__(self, layers: dict[str, BatchNorm]) -> None:
        self.rows: dict[str, int] = {}
        self.values: dict[str, float] = {}
        self.totals: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._handles = [
            layer.register_forward_pre_hook(self._looker(name), with_kwargs=True)
            for name, layer in layers.items()
        ]

    def num_parts(self, num_rows: int | None) -> int:
        """Into how many parts a batch of so many rows was cut on its way, be it by a
        split window or by the module: a layer has then seen all of it, but not at
        once."""
        cut = [self.calls[n] for n, total in self.totals.items() if total == num_rows]
        return max(cut, default=1)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _looker(self, name: str) -> Any:
        def look(layer: Any, args: Any, kwargs: Any) -> None:
            x = args[0] if args else kwargs.get("input")
            if layer.training and isinstance(x, Tensor) and x.ndim >= 2:
                rows = x.shape[0]
                self.totals[name] += rows
                self.calls[name] += 1
                self.rows[name] = min(rows, self.rows.get(name, rows))
                per_channel = x.numel() / max(x.shape[1], 1)
                self.values[name] = per_channel / max(rows, 1)

        return look
