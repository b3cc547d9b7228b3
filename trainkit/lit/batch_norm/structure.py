"""The policy that replaces BatchNorm by another layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from trainkit.core.batch_norm.layers import layers_to_train, listed
from trainkit.core.batch_norm.replace import to_group_norm
from trainkit.errors import TrainkitError
from trainkit.lit._compat import average_of
from trainkit.lit.batch_norm.policy import Policy


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
