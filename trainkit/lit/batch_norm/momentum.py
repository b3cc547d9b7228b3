"""Running statistics that forget as slowly as the big batch's."""

from __future__ import annotations

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
        self._original: dict[str, float] = {}
        self._set: dict[str, float] = {}
        self._layers: dict[str, BatchNorm] = {}

    def start(self, trainer: Any, module: Any, layers: dict[str, BatchNorm]) -> None:
        self._layers = {n: x for n, x in layers.items() if x.momentum is not None}
        self._original = {n: float(x.momentum or 0) for n, x in self._layers.items()}
        self._set = dict(self._original)

    def open_window(self, num_micro_batches: int) -> None:
        for name, layer in self._layers.items():
            if layer.momentum == self._set[name]:
                self._set[name] = layer.momentum = momentum_per_micro_batch(
                    self._original[name], num_micro_batches
                )

    def end(self) -> None:
        for name, layer in self._layers.items():
            if layer.momentum == self._set[name]:
                layer.momentum = self._original[name]
        self._layers = {}

    def summary(self, num_layers: int) -> str:
        values = sorted(set(self._original.values()))
        if not values:
            return "momentum=None, the plain mean of all micro-batches, left as it is"
        return "momentum " + ", ".join(f"{m:g} -> 1 - {1 - m:g}^(1/N)" for m in values)
