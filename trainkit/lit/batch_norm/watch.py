"""What BatchNorm layers really see, in the first window."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trainkit.core.batch_norm.layers import BatchNorm


class ShapeWatch:
    """Looks at layers' inputs until it is closed.

    Attributes:
        rows: the fewest rows that a layer has seen at once.
        values: for each layer, how many values per channel a row gives it.
    """

    def __init__(self, layers: dict[str, BatchNorm]) -> None:
        self.rows: dict[str, int] = {}
        self.values: dict[str, float] = {}
        self._handles = [
            layer.register_forward_pre_hook(self._looker(name), with_kwargs=True)
            for name, layer in layers.items()
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _looker(self, name: str) -> Any:
        def look(layer: Any, args: Any, kwargs: Any) -> None:
            x = args[0] if args else kwargs.get("input")
            if layer.training and isinstance(x, Tensor) and x.ndim >= 2:
                rows = x.shape[0]
                self.rows[name] = min(rows, self.rows.get(name, rows))
                per_channel = x.numel() / max(x.shape[1], 1)
                self.values[name] = per_channel / max(rows, 1)

        return look
