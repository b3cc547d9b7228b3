"""The policy that slows down running statistics to the pace of the big batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainkit.core.batch_norm.layers import BatchNorm, momentum_per_micro_batch
from trainkit.lit.batch_norm.policy import Policy


class Momentum(Policy):
    """Sets the momentum m' = 1 - (1 - m)^(1/N) for each window of N micro-batches.

    So a short last window moves the statistics as far as a full one. Layers with
    `momentum=None` are not changed: they keep the plain mean of all micro-batches. If
    other code changes a layer's momentum, it keeps that value.
    """

    def __init__(self) -> None:
        self._changed: dict[BatchNorm, _Momentum] = {}

    def start(self, trainer: Any, module: Any, layers: dict[str, BatchNorm]) -> None:
        self._changed = {}
        self._add(layers)

    def open_window(self, num_micro_batches: int, layers: dict[str, BatchNorm]) -> None:
        self._add(layers)
        for layer, momentum in self._changed.items():
            if layer.momentum in (momentum.set, momentum.before):
                momentum.before = layer.momentum
                momentum.set = layer.momentum = momentum_per_micro_batch(
                    momentum.original, num_micro_batches
                )

    def _add(self, layers: dict[str, BatchNorm]) -> None:
        for layer in layers.values():
            if layer.momentum is not None and layer not in self._changed:
                self._changed[layer] = _Momentum(*[layer.momentum] * 3)

    def end(self) -> None:
        for layer, momentum in self._changed.items():
            if layer.momentum in (momentum.set, momentum.before):
                layer.momentum = momentum.original
        self._changed = {}

    def summary(self, num_layers: int) -> str:
        values = sorted({momentum.original for momentum in self._changed.values()})
        if not values:
            return "momentum=None, the plain mean of all micro-batches, left as it is"
        return "momentum " + ", ".join(f"{m:g} -> 1 - {1 - m:g}^(1/N)" for m in values)


@dataclass
class _Momentum:
    """A layer's momentum before training, in this window, and in the window before.

    A window that is run again in smaller parts starts with the last of these.
    """

    original: float
    set: float
    before: float
