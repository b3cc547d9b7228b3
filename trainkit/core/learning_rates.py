"""Multiplying everything in optimizers and schedulers that is a learning rate.

torch's schedulers are homogeneous in their learning rates: where every rate that they
hold, current, initial and limiting, is multiplied by one factor, the rest of the curve
is that factor times what it would have been, from any point of it.
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
    """Multiply every learning rate, so that the rest of each curve is `factor` times
    what it would have been.

    Args:
        optimizers: whose groups, each with rates of its own.
        schedulers: torch's, or such as keep their rates in attributes; nested ones
            are found.
        factor: the same for all.
        also: attributes of other people's schedulers that hold rates as well.
    """

    def multiplied(rate: Any) -> Any:
        return rate * factor

    # Schedulers first: a list of theirs may share a tensor with a group, and only the
    # groups' tensors are changed in place.
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


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class GroupChange:
    """What becomes of a group's other hyperparameters."""

    beta1: Map = _same
    beta2: Map = _same
    eps: Map = _same
    weight_decay: Map = _same

    def apply(self, optimizers: Iterable[Any], schedulers: Iterable[Any]) -> None:
        """Change them, also where a scheduler cycles beta1."""
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
        if self.eps is not _same:  # Adafactor's is a pair
            _change(group, "eps", self.eps)
        if self.weight_decay is not _same:
            _change(group, "weight_decay", self.weight_decay)


def every_scheduler(schedulers: Iterable[Any]) -> Iterator[Any]:
    """Schedulers and those inside them, each once."""
    seen: set[int] = set()
    waiting = list(schedulers)
    while waiting:
        scheduler = waiting.pop(0)
        if id(scheduler) not in seen:
            seen.add(id(scheduler))
            yield scheduler
            waiting.extend(nested_schedulers(scheduler))


def _change(held: Any, key: str, change: Map) -> None:
    """Change a number, a tensor or each number of a list, if it is there."""
    value = held.get(key)
    if value is None:
        return
    if isinstance(value, list | tuple):
        held[key] = type(value)(map(change, value))
    elif isinstance(value, Tensor):
        value.copy_(change(value))  # a compiled optimizer knows it by its address
    else:
        held[key] = change(value)
