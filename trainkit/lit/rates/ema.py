"""Moving averages of a model whose decay follows the effective batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
)

from trainkit.core.plan.options import brief
from trainkit.core.plan.scaling import same_half_life
from trainkit.errors import TrainkitError
from trainkit.lit._compat import average_of

_MAKERS: dict[str, Callable[[float], Any]] = {
    "avg_fn": get_ema_avg_fn,
    "multi_avg_fn": get_ema_multi_avg_fn,
}


class ModelAverages:
    """The moving averages of a model, held at the decay for k times the batch.

    The formula is decay ** k (Busbridge et al. 2023).

    Args:
        trainer: its callbacks may average.
        pl_module: it may hold an `AveragedModel`.
        where: True finds torch's and Lightning's averages; a string is the path of a
            decay in the module.
        saved_k: the k for which a decay from a checkpoint is set.
    """

    def __init__(
        self, trainer: Any, pl_module: Any, where: bool | str, *, saved_k: float
    ) -> None:
        found = _by_path(pl_module, where) if isinstance(where, str) else []
        if where is True:
            models = [m for m in pl_module.modules() if isinstance(m, AveragedModel)]
            models += filter(None, map(average_of, trainer.callbacks))
            found = [decay for model in models for decay in _of_averaged_model(model)]
        if not found:
            raise TrainkitError(
                f"LRScaling ema_decay={where!r}: no moving average was found. It knows "
                f"Lightning's EMAWeightAveraging and torch's AveragedModel with "
                f"get_ema_avg_fn(); otherwise give the path of the decay, such as "
                f"'teacher.decay'."
            )
        self._decays = found
        for decay in found:
            if decay.is_saved:
                decay.k = saved_k

    @property
    def k(self) -> float:
        """The k for which the decays are set."""
        return self._decays[0].k

    def follow(self, k: float) -> None:
        """Set the decays for k times the reference batch."""
        for decay in self._decays:
            decay.follow(k)

    def summary(self) -> str:
        decay = self._decays[0]
        before = same_half_life(decay.value, 1 / decay.k)
        return f"decay {brief(before)} -> {brief(decay.value)}"


class Decay:
    """One decay of a moving average.

    Args:
        value: the decay for the reference batch.
        put: writes another decay to where it is kept.
        is_saved: whether checkpoints hold it.

    Attributes:
        value: the decay now.
        k: the k for which it is set.
    """

    def __init__(
        self, value: Any, put: Callable[[Any], object], *, is_saved: bool = False
    ) -> None:
        self._original = self.value = float(value)
        self._put = put
        self.is_saved = is_saved
        self.k = 1.0

    def follow(self, k: float) -> None:
        if k != self.k:
            self.value = same_half_life(self.value, k / self.k)
            self.k = k
            self._put(self._original if k == 1 and not self.is_saved else self.value)


def _of_averaged_model(model: AveragedModel) -> list[Decay]:
    found = []
    for name, make in _MAKERS.items():
        function = getattr(model, name, None)
        if not inspect.isfunction(function):
            continue
        function = inspect.unwrap(function)  # from torch.no_grad()
        decay = inspect.getclosurevars(function).nonlocals.get("decay")
        if decay is not None:

            def put(value: float, name: str = name, make: Any = make) -> None:
                setattr(model, name, make(value))

            found.append(Decay(decay, put))
    return found


def _by_path(pl_module: Any, path: str) -> list[Decay]:
    parent_path, _, name = path.rpartition(".")
    try:
        parent = attrgetter(parent_path)(pl_module) if parent_path else pl_module
        value = getattr(parent, name)
    except AttributeError as error:
        raise TrainkitError(
            f"LRScaling ema_decay={path!r}: {type(pl_module).__name__} has nothing "
            f"there ({error}). Give the dotted path of a decay, a number or a tensor."
        ) from None
    if isinstance(value, Tensor):
        return [Decay(value, lambda decay: value.fill_(decay), is_saved=True)]
    if not isinstance(value, float):
        raise TrainkitError(
            f"LRScaling ema_decay={path!r}: must lead to a number or a tensor, and "
            f"leads to {value!r}."
        )
    return [Decay(value, lambda decay: setattr(parent, name, decay))]
