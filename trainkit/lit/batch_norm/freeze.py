"""The policy that freezes the statistics of BatchNorm."""

from __future__ import annotations

from typing import Any

from torch import nn

from trainkit.core.batch_norm.freeze import freeze, thaw
from trainkit.core.batch_norm.layers import BatchNorm, layers_to_train
from trainkit.errors import TrainkitError
from trainkit.lit.batch_norm.policy import Policy
from trainkit.lit.batch_norm.structure import refuse_left_over
from trainkit.lit.callback.base import has_callback


class Freeze(Policy):
    """Keeps layers in evaluation mode until training ends.

    A `train()` by Lightning or by the user does not change that.
    """

    def __init__(self, *, affine: bool) -> None:
        self._affine = affine
        self._parameters: list[nn.Parameter] = []
        self._layers: list[BatchNorm] = []

    def convert(self, module: Any, trainer: Any) -> None:
        # DDP and the optimizer have not yet looked at what trains.
        for layer in layers_to_train(module).values() if self._affine else ():
            for parameter in layer.parameters(recurse=False):
                if parameter.requires_grad:
                    parameter.requires_grad_(False)
                    self._parameters.append(parameter)

    def start(self, trainer: Any, module: Any, layers: dict[str, BatchNorm]) -> None:
        if has_callback(trainer.callbacks, "StochasticWeightAveraging"):
            raise TrainkitError(
                "BatchNormGuard('freeze'): StochasticWeightAveraging throws the "
                "statistics away at its end, and frozen layers make no new ones. Leave "
                "one of the two out."
            )
        if self._affine:
            late = [n for n, x in layers.items() if _trains_weights(x)]
            refuse_left_over(module, late, "freeze")
        self._freeze(layers)

    def open_window(self, num_micro_batches: int, layers: dict[str, BatchNorm]) -> None:
        self._freeze(layers)  # finetuning may have unfrozen some

    def _freeze(self, layers: dict[str, BatchNorm]) -> None:
        for layer in layers.values():
            freeze(layer)
            self._layers.append(layer)

    def end(self) -> None:
        for layer in self._layers:
            thaw(layer)
        for parameter in self._parameters:
            parameter.requires_grad_(True)
        self._layers, self._parameters = [], []

    def summary(self, num_layers: int) -> str:
        kept = "weights and statistics" if self._affine else "statistics"
        return f"frozen, {kept} stay as they are"


def _trains_weights(layer: BatchNorm) -> bool:
    return any(p.requires_grad for p in layer.parameters(recurse=False))
