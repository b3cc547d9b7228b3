"""Learning rates in optimizers and schedulers: changed as one, or on a curve."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from trainkit.core._compat import LAST_RATES, nested_schedulers
from trainkit.core.plan.options import check_whole_number
from trainkit.errors import TrainkitError

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


def _unchanged(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Change:
    """Functions that change hyperparameters, wherever torch keeps them.

    torch's schedulers are linear in their rates. If all rates in them (the current
    ones, the first ones and the limits) are multiplied by one factor, the rest of the
    curve is multiplied by it too, wherever on the curve that happens.
    """

    rate: Map = _unchanged  # multiplies by one factor
    beta1: Map = _unchanged
    beta2: Map = _unchanged  # RMSprop's alpha, too
    eps: Map = _unchanged
    weight_decay: Map = _unchanged

    def apply(
        self, optimizer: Any, schedulers: Iterable[Any], *, also: Sequence[str] = ()
    ) -> None:
        """Change an optimizer and its schedulers, with the schedulers inside them.

        Schedulers that are not torch's may have rates in more attributes: `also`.
        """
        # Schedulers first: their lists may share a tensor with a group, and the tensors
        # of groups are changed in place.
        for scheduler in every_scheduler(schedulers):
            held = vars(scheduler)
            for key in (*SCHEDULER_RATES, *also):
                _change(held, key, self.rate)
            if isinstance(scheduler, ReduceLROnPlateau):
                _change(held, "eps", self.rate)  # the least change that counts
            if "betas" in scheduler.optimizer.defaults:
                for key in SCHEDULER_MOMENTA:
                    _change(held, key, self.beta1)
        done: set[int] = set()
        for group in optimizer.param_groups:
            for key in GROUP_RATES:
                rate = group.get(key)
                if id(rate) not in done:
                    _change(group, key, self.rate)
                if isinstance(rate, Tensor):  # one for several groups
                    done.add(id(rate))
            self.apply_to_moments(group)

    def apply_to_moments(self, group: dict[str, Any]) -> None:
        """Change one group, but for its rates."""
        if "betas" in group:
            beta1, beta2, *rest = group["betas"]
            group["betas"] = (self.beta1(beta1), self.beta2(beta2), *rest)
            for key in GROUP_MOMENTA:
                _change(group, key, self.beta1)
        else:
            _change(group, "alpha", self.beta2)
        _change(group, "eps", self.eps)
        _change(group, "weight_decay", self.weight_decay)


def every_scheduler(schedulers: Iterable[Any]) -> list[Any]:
    """All schedulers, and the schedulers inside them, without repetition."""
    found: dict[int, Any] = {}
    for scheduler in schedulers:
        inside = every_scheduler(nested_schedulers(scheduler))
        found |= {id(each): each for each in (scheduler, *inside)}
    return list(found.values())


def _change(held: dict[str, Any], key: str, change: Map) -> None:
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


@dataclass(frozen=True)
class WarmupCosine:
    """The rate at a step, as a share of the largest rate.

        (step + 1) / warmup_steps                         during the warm-up
        final + (1 - final) (1 + cos(pi progress)) / 2    after it, to the end

    >>> curve = WarmupCosine(total_steps=10, warmup_steps=2, final=0.1)
    >>> [round(curve(step), 2) for step in (0, 1, 2, 6, 10, 11)]
    [0.5, 1.0, 1.0, 0.55, 0.1, 0.1]
    """

    total_steps: int
    warmup_steps: int
    final: float

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        left = max(self.total_steps - self.warmup_steps, 1)
        progress = min((step - self.warmup_steps) / left, 1.0)
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * progress)) / 2


def warmup_cosine(
    optimizer: Optimizer, *, total_steps: int, warmup: float = 0.0, final: float = 0.0
) -> LambdaLR:
    """A scheduler for `interval="step"` (Loshchilov and Hutter 2017, with a warm-up).

    Args:
        optimizer: its rates are the largest of the curve.
        total_steps: optimizer steps of the training, with the warm-up.
        warmup: the share of these steps in which the rate rises.
        final: the last rate, as a share of the largest.
    """
    hint = "It is the number of optimizer steps of the whole training."
    check_whole_number("warmup_cosine total_steps", total_steps, hint=hint)
    for name, share in (("warmup", warmup), ("final", final)):
        if not 0 <= share <= 1:
            raise TrainkitError(
                f"warmup_cosine {name}: must lie in 0 to 1, received {share}. It is a "
                f"share of the {'steps' if name == 'warmup' else 'largest rate'}."
            )
    curve = WarmupCosine(total_steps, round(warmup * total_steps), final)
    return LambdaLR(optimizer, curve)
