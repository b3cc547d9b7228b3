"""What a guard can do about BatchNorm: keep statistics, slow them down, or replace the
layers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from typing import Any

from torch import nn

from trainkit.core.batch_norm.layers import (
    BatchNorm,
    freeze,
    layers_to_train,
    listed,
    momentum_per_micro_batch,
    thaw,
    to_group_norm,
)
from trainkit.errors import TrainkitError
from trainkit.lit._compat import average_of
from trainkit.lit.callback.base import has_callback


class Policy:
    """Base of the policies; itself it does nothing.

    Attributes:
        samples: of a micro-batch, on one rank, by the first loader batch; may be NaN.
    """

    samples = math.nan

    def begin(self, trainer: Any, module: Any) -> None:
        """Prepare for training, before the first batch is loaded."""

    def convert(self, module: Any, trainer: Any) -> None:
        """Change the module's layers, before the optimizer is made."""

    def start(self, trainer: Any, module: Any, layers: dict[str, BatchNorm]) -> None:
        """Prepare for the first batch, in which these layers train."""

    def note_modes(self, module: Any) -> None:
        """Remember the modes (`training`) that all parts of the module have now."""

    def open_window(self, num_micro_batches: int, layers: dict[str, BatchNorm]) -> None:
        """Prepare for a window, in which these layers train."""

    def before_use(self, trainer: Any, module: Any) -> None:
        """Complete the running statistics, which are about to be used or saved."""

    def save(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        """Complete a checkpoint that is being written."""

    def end(self) -> None:
        """Undo, when training is over, what is meant for training only."""

    def summary(self, num_layers: int) -> str:
        """What the policy does, for the table before training; may be empty."""
        return ""


class Freeze(Policy):
    """Keeps layers in evaluation mode until training ends.

    A `train()` by Lightning or by the user does not change that.
    """

    def __init__(self, *, freeze_affine: bool) -> None:
        self._affine = freeze_affine
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


class Momentum(Policy):
    """Sets the momentum m' = 1 - (1 - m)^(1/N) for each window of N micro-batches.

    So a short last window moves the statistics as far as a full one. Layers with
    `momentum=None` are not changed: they keep the plain mean of all micro-batches. If
    other code changes a layer's momentum, it keeps that value.
    """

    def __init__(self) -> None:
        self._changed: dict[BatchNorm, list[float]] = {}
        """The momentum before training, in the window before, and in this one: a window
        that is run again in smaller parts starts with the one before."""

    def start(self, trainer: Any, module: Any, layers: dict[str, BatchNorm]) -> None:
        self._changed = {}
        self._add(layers)

    def open_window(self, num_micro_batches: int, layers: dict[str, BatchNorm]) -> None:
        self._add(layers)
        for layer, momentum in self._changed.items():
            if layer.momentum in momentum[1:]:
                now = momentum_per_micro_batch(momentum[0], num_micro_batches)
                momentum[1:] = layer.momentum, now
                layer.momentum = now

    def _add(self, layers: dict[str, BatchNorm]) -> None:
        for layer in layers.values():
            if layer.momentum is not None and layer not in self._changed:
                self._changed[layer] = [layer.momentum] * 2

    def end(self) -> None:
        for layer, momentum in self._changed.items():
            if layer.momentum in momentum[1:]:
                layer.momentum = momentum[0]
        self._changed = {}

    def summary(self, num_layers: int) -> str:
        values = sorted({momentum[0] for momentum in self._changed.values()})
        if not values:
            return "momentum=None, the plain mean of all micro-batches, left as it is"
        return "momentum " + ", ".join(f"{m:g} -> 1 - {1 - m:g}^(1/N)" for m in values)


class GroupNormInstead(Policy):
    """Replaces BatchNorm by GroupNorm, which normalises each sample by itself."""

    def __init__(self, *, groups: int) -> None:
        self._groups = groups
        self._made: dict[str, Any] = {}

    def convert(self, module: Any, trainer: Any) -> None:
        refuse_earlier_copy(layers_to_train(module), trainer, "group_norm")
        self._made |= to_group_norm(module, groups=self._groups)

    def start(self, trainer: Any, module: Any, layers: Any) -> None:
        refuse_left_over(module, list(layers), "group_norm")

    def summary(self, num_layers: int) -> str:
        counts = Counter(layer.num_groups for layer in self._made.values())
        groups = ", ".join(
            f"{n} with {g} group{'s' * (g != 1)}" for g, n in sorted(counts.items())
        )
        return f"replaced by GroupNorm ({groups or 'none was there'})"


def refuse_left_over(module: Any, names: list[str], policy: str) -> None:
    """Refuse layers that were made after the guard's `setup`."""
    if names:
        raise TrainkitError(
            f"BatchNormGuard({policy!r}): {listed(names)} came into "
            f"{type(module).__name__} in its setup or configure_model. That is too "
            f"late, since no callback is called between these and "
            f"configure_optimizers. Call guard.convert(self) where it makes them."
        )


def refuse_earlier_copy(layers: Collection[Any], trainer: Any, policy: str) -> None:
    """Refuse to replace layers of a module that `WeightAveraging` has copied."""
    callbacks = [] if trainer is None else trainer.callbacks
    if layers and any(average_of(each) is not None for each in callbacks):
        raise TrainkitError(
            f"BatchNormGuard({policy!r}): it replaces layers, but a WeightAveraging "
            f"callback that stands before it has already copied the module. Put "
            f"BatchNormGuard before it in the Trainer's callbacks."
        )
