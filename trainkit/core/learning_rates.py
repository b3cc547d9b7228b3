"""Multiplying all learning rates in optimizers and schedulers by a factor.

torch's schedulers are linear in their rates. If all rates in them (the current ones,
the first ones and the limits) are multiplied by one factor, the rest of the curve is
multiplied by it too, wherever on the curve that happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainkit.core._compat import LAST_RATES, nested_schedulers

GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
SCHEDULER_RATES = (
    "base_lrs",
    "max_lrs",
    "min_lrs",
    "default_min_lr",
    "eta_min",
    LAST_RATES,
)
GROUP_MOMENTA = ("base_momentum", "max_momentum")
SCHEDULER_MOMENTA = ("base_momentums", "max_momentums")

Map = Callable[[Any], Any]


def multiply_rates(
    optimizers: Iterable[Any],
    schedulers: Iterable[Any],
    factor: float,
    *,
    also: Sequence[str] = (),
) -> None:
    """Multiply every learning rate, and so the rest of every curve, by `factor`.

    Args:
        optimizers: their parameter groups have rates.
        schedulers: torch's, or others that keep their rates in attributes. Schedulers
            inside them are found.
        factor: one factor for all rates.
        also: names of further attributes of schedulers that are rates.
    """

    def multiplied(rate: Any) -> Any:
        return rate * factor

    # Schedulers first: their lists may share a tensor with a group, and the tensors of
    # groups are changed in place.
    for scheduler in every_scheduler(schedulers):
        held = vars(scheduler)
        for key in (*SCHEDULER_RATES, *also):
            _change(held, key, multiplied)
        if isinstance(scheduler, ReduceLROnPlateau):
            _change(held, "eps", multiplied)  # the least change of a rate that counts
    done: set[int] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for key in GROUP_RATES:
                if id(group.get(key)) not in done:
                    _change(group, key, multiplied)
                    if isinstance(group.get(key), Tensor):  # one for several groups
                        done.add(id(group[key]))


def _unchanged(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class GroupChange:
    """Functions that change the other hyperparameters of a parameter group."""

    beta1: Map = _unchanged
    beta2: Map = _unchanged
    eps: Map = _unchanged
    weight_decay: Map = _unchanged

    def apply(self, optimizers: Iterable[Any], schedulers: Iterable[Any]) -> None:
        """Change all groups, and the limits of schedulers that cycle beta1."""
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                self.apply_to(group)
        for scheduler in every_scheduler(schedulers):
            if "betas" in scheduler.optimizer.defaults:
                for key in SCHEDULER_MOMENTA:
                    _change(vars(scheduler), key, self.beta1)

    def apply_to(self, group: dict[str, Any]) -> None:
        """Change one group."""
        if "betas" in group:
            beta1, beta2, *rest = group["betas"]
            group["betas"] = (self.beta1(beta1), self.beta2(beta2), *rest)
            for key in GROUP_MOMENTA:
                _change(group, key, self.beta1)
        else:
            _change(group, "alpha", self.beta2)  # RMSprop's second moment
        _change(group, "eps", self.eps)
        _change(group, "weight_decay", self.weight_decay)


def every_scheduler(schedulers: Iterable[Any]) -> Iterator[Any]:
    """All schedulers, and the schedulers inside them, without repetition."""
    seen: set[int] = set()
    waiting = list(schedulers)
    while waiting:
        scheduler = waiting.pop(0)
        if id(scheduler) not in seen:
            seen.add(id(scheduler))
            yield scheduler
            waiting.extend(nested_schedulers(scheduler))


def _change(held: Any, key: str, change: Map) -> None:
    """Change a number, a tensor or each number of a list, if there is one."""
    value = held.get(key)
    if value is None or change is _unchanged:
        return
    if isinstance(value, list | tuple):
        held[key] = type(value)(map(change, value))
    elif isinstance(value, Tensor):
        value.copy_(change(value))  # a compiled optimizer keeps its address
    else:
        held[key] = change(value)
