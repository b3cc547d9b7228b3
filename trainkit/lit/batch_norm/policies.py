"""What a guard can do about BatchNorm: keep statistics, slow them down, or replace the
layers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Window:
    """A window that begins.

    Attributes:
        trainer: in `fit`.
        module: what trains.
        layers: that train in it.
        num_micro_batches: how many it has.
        samples: of a micro-batch, on one rank, by the first loader batch; may be NaN.
        is_first: whether it is the first of this `fit`.
        begins_epoch: whether it is the first of an epoch.
    """

    trainer: Any
    module: Any
    layers: dict[str, BatchNorm]
    num_micro_batches: int
    samples: float
    is_first: bool
    begins_epoch: bool


class Policy:
    """Base of the policies; itself it does nothing."""

    def convert(self, module: Any, trainer: Any) -> None:
        """Change the module's layers, before the optimizer is made."""

    def begin(self, trainer: Any, module: Any) -> None:
        """Prepare for training, before the first batch is loaded."""

    def open_window(self, window: Window) -> None:
        """Prepare for a window. By the first one, the module's own hooks have decided
        which of its parts train."""

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

    def __init__(self) -> None:
        self._layers: list[BatchNorm] = []

    def open_window(self, window: Window) -> None:
        if has_callback(window.trainer.callbacks, "StochasticWeightAveraging"):
            raise TrainkitError(
                "BatchNormGuard('freeze'): StochasticWeightAveraging throws the "
                "statistics away at its end, and frozen layers make no new ones. Leave "
                "one of the two out."
            )
        for layer in window.layers.values():  # finetuning may have unfrozen some
            freeze(layer)
            self._layers.append(layer)

    def end(self) -> None:
        for layer in self._layers:
            thaw(layer)
        self._layers = []

    def summary(self, num_layers: int) -> str:
        return "frozen, statistics stay as they are"


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

    def open_window(self, window: Window) -> None:
        for layer in window.layers.values():
            if layer.momentum is not None:
                self._changed.setdefault(layer, [layer.momentum] * 2)
        for layer, momentum in self._changed.items():
            if layer.momentum in momentum[1:]:
                now = momentum_per_micro_batch(momentum[0], window.num_micro_batches)
                momentum[1:] = layer.momentum, now
                layer.momentum = now

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
        """Replace layers, unless `WeightAveraging` has copied the module before."""
        callbacks = [] if trainer is None else trainer.callbacks
        if layers_to_train(module) and any(map(average_of, callbacks)):
            raise TrainkitError(
                "BatchNormGuard('group_norm'): it replaces layers, but a "
                "WeightAveraging callback that stands before it has already copied the "
                "module. Put BatchNormGuard before it in the Trainer's callbacks."
            )
        self._made |= to_group_norm(module, groups=self._groups)

    def open_window(self, window: Window) -> None:
        if window.is_first and window.layers:
            raise TrainkitError(
                f"BatchNormGuard('group_norm'): {listed(list(window.layers))} came "
                f"into {type(window.module).__name__} in its setup or configure_model. "
                f"That is too late, since no callback is called between these and "
                f"configure_optimizers. Call guard.convert(self) where it makes them."
            )

    def summary(self, num_layers: int) -> str:
        counts = Counter(layer.num_groups for layer in self._made.values())
        groups = ", ".join(
            f"{n} with {g} group{'s' * (g != 1)}" for g, n in sorted(counts.items())
        )
        return f"replaced by GroupNorm ({groups or 'none was there'})"
