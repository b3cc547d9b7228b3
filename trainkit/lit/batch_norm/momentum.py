"""Running statistics that forget as slowly as the big batch's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainkit.core.batch_norm.layers import BatchNorm, momentum_per_micro_batch
from trainkit.lit.batch_norm.policy import Policy


class Momentum(Policy):
    """Sets m' = 1 - (1 - m)^(1/N) for each window of N micro-batches.

    A short last window has a larger one: a step is a step. Layers with `momentum=None`
    keep the plain mean of all micro-batches, which has nothing to forget. A layer whose
    momentum somebody else has changed meanwhile is left to them.
    """

    def __init__(self) -> None:
        self._changed: dict[BatchNorm, _Momentum] = {}

    def start(self, trainer: Any, module: Any, layers: dict[str, BatchNorm]) -> None:
        self._changed = {}
        self._take_in(layers)

    def open_window(self, num_micro_batches: int, layers: dict[str, BatchNorm]) -> None:
        self._take_in(layers)
        for layer, momentum in self._changed.items():
            if layer.momentum in (momentum.set, momentum.before):
                momentum.before = layer.momentum
                momentum.set = layer.momentum = momentum_per_micro_batch(
                    momentum.original, num_micro_batches
                )

    def _take_in(self, layers: dict[str, BatchNorm]) -> None:
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
    """What a layer's was, what it has been set to, and what it was set to before that:
    a window that is run again in smaller parts begins with that one."""

    original: float
    set: float
    before: float
