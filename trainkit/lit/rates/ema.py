"""Model averages whose decay follows the batch (Busbridge et al. 2023)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
)

from trainkit.core.effective import brief
from trainkit.core.scaling import ema_decay
from trainkit.errors import TrainkitError
from trainkit.lit._compat import average_of

MAKERS: dict[str, Callable[[float], Any]] = {
    "avg_fn": get_ema_avg_fn,
    "multi_avg_fn": get_ema_multi_avg_fn,
}


class ModelAverages:
    """The moving averages of a model, held at the decay of k times the batch.

    Args:
        trainer: whose callbacks may average.
        pl_module: which may hold an `AveragedModel`.
        where: True looks for torch's and Lightning's; a string is the path of a decay
            in the module.
        saved_k: for which batch a decay stands that a checkpoint brought back.
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
        """For which batch the decays stand."""
        return self._decays[0].k

    def follow(self, k: float) -> None:
        """Set the decays for k times the reference batch."""
        for decay in self._decays:
            decay.follow(k)

    def restore(self) -> None:
        """Set the decays back to their values for the reference batch."""
        self.follow(1.0)

    def summary(self) -> str:
        decay = self._decays[0]
        before = ema_decay(decay.value, 1 / decay.k)
        return f"decay {brief(before)} -> {brief(decay.value)}"


class Decay:
    """One decay, wherever it is kept.

    Attributes:
        value: what it is now.
        k: for which batch that is.
        is_saved: whether checkpoints hold it.
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
            self.value = ema_decay(self.value, k / self.k)
            self.k = k
            self._put(self._original if k == 1 and not self.is_saved else self.value)


def _of_averaged_model(model: AveragedModel) -> list[Decay]:
    found = []
    for name, make in MAKERS.items():
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
        parent = pl_module
        for part in filter(None, parent_path.split(".")):
            parent = getattr(parent, part)
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
