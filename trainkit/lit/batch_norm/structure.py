"""The policies that replace BatchNorm by other layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from torch import nn

from trainkit.core.batch_norm.layers import layers_to_train, listed
from trainkit.core.batch_norm.renorm import BatchRenorm
from trainkit.core.batch_norm.replace import to_group_norm, to_renorm, to_sync
from trainkit.errors import TrainkitError
from trainkit.lit._compat import average_of
from trainkit.lit.batch_norm.policy import Policy
from trainkit.lit.batch_size.effective import num_replicas


class GroupNormInstead(Policy):
    """Replaces BatchNorm by GroupNorm, which normalises each sample by itself."""

    computes_from_micro_batches = False

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


class Renorm(Policy):
    """Replaces BatchNorm by Batch Renormalization.

    Its limits open over `ramp_steps` optimizer steps. The layers count micro-batches,
    so a checkpoint keeps the length of the ramp in these (`ramp`).
    """

    def __init__(self, *, r_max: float, d_max: float, ramp_steps: int) -> None:
        self._limits = {"r_max": r_max, "d_max": d_max}
        self._ramp_steps = ramp_steps
        self._made: list[BatchRenorm] = []
        self._ramp: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The attributes without the layers, which belong to the module."""
        return {**vars(self), "_made": []}

    def convert(self, module: Any, trainer: Any) -> None:
        self._ramp = None  # it may be left from an earlier training
        theirs = [m for m in module.modules() if isinstance(m, BatchRenorm)]
        others = [x for x in layers_to_train(module).values() if x not in theirs]
        refuse_earlier_copy(others, trainer, "renorm")
        to_renorm(module, **self._limits, ramp=self._ramp_steps)
        self._made += [
            m
            for m in module.modules()
            if isinstance(m, BatchRenorm) and m not in theirs
        ]

    def start(self, trainer: Any, module: Any, layers: Any) -> None:
        # In `convert` an AccumulationSchedule may not have set the size yet.
        if self._ramp is None:
            self._ramp = self._ramp_steps * int(trainer.accumulate_grad_batches)
        for layer in self._made:
            layer.ramp = self._ramp
        left = [n for n, layer in layers.items() if not isinstance(layer, BatchRenorm)]
        refuse_left_over(module, left, "renorm")

    def state_dict(self) -> dict[str, Any]:
        return {} if self._ramp is None else {"ramp": self._ramp}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # A schedule may have changed the size of windows since the ramp began.
        self._ramp = state.get("ramp")

    def summary(self, num_layers: int) -> str:
        r, d = self._limits["r_max"], self._limits["d_max"]
        return (
            f"replaced by Batch Renormalization (r up to {r:g}, d up to {d:g}, opened "
            f"over {self._ramp_steps} steps)"
        )


class Sync(Policy):
    """Replaces BatchNorm by SyncBatchNorm, if there are several ranks."""

    def __init__(self) -> None:
        self._num_ranks = 1

    def convert(self, module: Any, trainer: Any) -> None:
        if trainer is None or num_replicas(trainer) == 1:
            return
        self._num_ranks = num_replicas(trainer)
        if trainer.strategy.root_device.type == "cpu" and layers_to_train(module):
            raise TrainkitError(
                f"BatchNormGuard('sync'): torch's SyncBatchNorm runs on accelerators "
                f"only, and the ranks are on {trainer.strategy.root_device}. Use "
                f"'group_norm', 'momentum' or 'recalibrate' on a CPU."
            )
        refuse_earlier_copy(layers_to_train(module), trainer, "sync")
        to_sync(module)

    def start(self, trainer: Any, module: Any, layers: Any) -> None:
        if self._num_ranks > 1:
            left = [n for n, x in layers.items() if not isinstance(x, nn.SyncBatchNorm)]
            refuse_left_over(module, left, "sync")

    def summary(self, num_layers: int) -> str:
        if self._num_ranks == 1:
            return "left as it is, since there is one rank to synchronise"
        return f"synchronised over {self._num_ranks} ranks"


def refuse_left_over(module: Any, names: list[str], policy: str) -> None:
    """Refuse layers that were made after the guard's `setup`."""
    if names:
        raise TrainkitError(
            f"BatchNormGuard({policy!r}): {listed(names)} came into "
            f"{type(module).__name__} in its setup or configure_model. That is too "
            f"late, since no callback is called between these and "
            f"configure_optimizers. Let the module inherit AccumulationMixin, or call "
            f"guard.convert(self) where it makes them."
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
