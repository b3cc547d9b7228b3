"""Other layers in BatchNorm's place."""

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
    """Group normalisation, which looks at one sample at a time."""

    computes_from_micro_batches = False

    def __init__(self, *, groups: int) -> None:
        self._groups = groups
        self._made: dict[str, nn.Module] = {}

    def convert(self, module: Any, trainer: Any) -> None:
        refuse_earlier_copy(layers_to_train(module), trainer, "group_norm")
        self._made |= to_group_norm(module, groups=self._groups)

    def start(self, trainer: Any, module: Any, layers: Any) -> None:
        refuse_left_over(module, list(layers), "group_norm")

    def summary(self, num_layers: int) -> str:
        counts = Counter(
            layer.num_groups
            for layer in self._made.values()
            if isinstance(layer, nn.GroupNorm)
        )
        groups = ", ".join(
            f"{n} with {g} group{'s' * (g != 1)}" for g, n in sorted(counts.items())
        )
        return f"replaced by GroupNorm ({groups or 'none was there'})"


class Renorm(Policy):
    """Batch Renormalization; its limits open over some optimizer steps."""

    def __init__(self, *, r_max: float, d_max: float, ramp_steps: int) -> None:
        self._limits = {"r_max": r_max, "d_max": d_max}
        self._ramp_steps = ramp_steps
        self._made: list[BatchRenorm] = []
        self._ramp: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the layers, which are the module's."""
        return {**vars(self), "_made": []}

    def convert(self, module: Any, trainer: Any) -> None:
        self._ramp = None  # that of an earlier training
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
        # Not before: an AccumulationSchedule may set it up later than this.
        if self._ramp is None:
            self._ramp = self._ramp_steps * int(trainer.accumulate_grad_batches)
        for layer in self._made:
            layer.ramp = self._ramp
        left = [n for n, layer in layers.items() if not isinstance(layer, BatchRenorm)]
        refuse_left_over(module, left, "renorm")

    def state_dict(self) -> dict[str, Any]:
        return {} if self._ramp is None else {"ramp": self._ramp}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # By now a schedule may have windows of another size than at the beginning.
        self._ramp = state.get("ramp")

    def summary(self, num_layers: int) -> str:
        r, d = self._limits["r_max"], self._limits["d_max"]
        return (
            f"replaced by Batch Renormalization (r up to {r:g}, d up to {d:g}, opened "
            f"over {self._ramp_steps} steps)"
        )


class Sync(Policy):
    """SyncBatchNorm, where there are several ranks."""

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
    """Refuse layers that came after `setup` and are in the optimizer already."""
    if names:
        raise TrainkitError(
            f"BatchNormGuard({policy!r}): {listed(names)} came into "
            f"{type(module).__name__} in its setup or configure_model, and no callback "
            f"is asked between those and the optimizer. Let the module inherit "
            f"AccumulationMixin, or call guard.convert(self) where it makes them."
        )


def refuse_earlier_copy(layers: Collection[Any], trainer: Any, policy: str) -> None:
    """`WeightAveraging` copies the module in its `setup`, perhaps before this one."""
    callbacks = [] if trainer is None else trainer.callbacks
    if layers and any(average_of(each) is not None for each in callbacks):
        raise TrainkitError(
            f"BatchNormGuard({policy!r}): it replaces layers, and a WeightAveraging "
            f"before it among the Trainer's callbacks has copied the module as it was. "
            f"Put BatchNormGuard before it."
        )
