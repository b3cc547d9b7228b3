"""An optimizer at scaled rates, whose schedulers and checkpoints know the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import ismethod
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from trainkit.core.plan.options import brief
from trainkit.core.plan.scaling import (
    checked_factor,
    decay_factor,
    make_rule,
    warmed_up,
)
from trainkit.errors import TrainkitError

BETAS = ("beta1", "beta2", "beta3")
Numbers = Mapping[str, Any]
"""The numbers of a group of parameters that a rule may change, by their names."""


class ScaledOptimizer:
    """Holds an optimizer at the numbers for k times the reference batch.

    The groups of parameters hold the scaled numbers. What draws a curve or saves it
    sees the user's: schedulers step within `unscaled()`, and `unscale()` writes them
    into a checkpoint. So every scheduler draws its own curve, and a checkpoint is that
    of a run without scaling.

    Attributes:
        optimizer: the torch optimizer.
        rule: the scaling rule, which has replaced `"auto"` or `"gain"`.
        factor: the factor by which its rates are multiplied now.
        target: the factor at the end of the warm-up.
        k: the k for which its moments (betas, eps) are set now.
        decay: the factor by which its weight decay is multiplied now.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        rule: str | Callable[[float], float],
        weight_decay: str | Callable[[float], float] = "none",
        noise_scale: float | None = None,
        reference_batch: float = 1.0,
    ) -> None:
        self.optimizer = optimizer
        how = {"noise_scale": noise_scale, "reference_batch": reference_batch}
        self.rule = make_rule(rule, type(optimizer), **how)  # type: ignore[arg-type]
        self._weight_decay = weight_decay
        self._refuse_unsuitable()
        self.factor = self.target = self.decay = self.k = 1.0
        self._own: Sequence[Numbers] = self._numbers()
        self._written = self._own

    def adopt(self, configs: Sequence[Any]) -> None:
        """Scale what is there by now: groups that were added, and schedulers.

        Finetuning adds groups of parameters, and `StochasticWeightAveraging` replaces
        the scheduler by its own.
        """
        for config in configs:
            scheduler = config.scheduler
            is_new = type(scheduler) is not UnscaledScheduler
            if is_new and scheduler.optimizer is self.optimizer:
                config.scheduler = UnscaledScheduler(scheduler, self)
        if len(self.optimizer.param_groups) > len(self._written):
            with self.unscaled():
                pass

    def follow(self, k: float, *, step: int = 0, warmup_steps: int = 0) -> None:
        """Scale to k times the reference batch, or to this step of the warm-up."""
        self.check_reach(k)
        self.target = checked_factor(f"rule {self.rule.name}", self.rule.lr, k)
        with self.unscaled():
            self.factor = warmed_up(self.target, step, warmup_steps)
            self.decay = decay_factor(self._weight_decay, k, self.target)
            self.k = k

    @contextmanager
    def unscaled(self) -> Iterator[None]:
        """Within, the groups hold the numbers for the reference batch."""
        self._own = self._written = self._own_now()
        self._write(self._own)
        try:
            yield
        finally:
            self._own = self._numbers()
            self._written = [self._scaled(own, self.factor) for own in self._own]
            self._write(self._written)

    def release(self) -> None:
        """Give the optimizer back as it would be without scaling."""
        self._write(self._own_now())

    def unscale(self, state: Mapping[str, Any]) -> None:
        """Write the user's numbers into what a checkpoint holds of the optimizer."""
        groups = state.get("param_groups", [])
        for group, own in zip(groups, self._own_now(), strict=False):
            _write(group, own, in_place=False)

    def _numbers(self) -> list[Numbers]:
        return [_numbers(group) for group in self.optimizer.param_groups]

    def _write(self, numbers: Sequence[Numbers]) -> None:
        for group, values in zip(self.optimizer.param_groups, numbers, strict=True):
            _write(group, values)

    def _scaled(self, own: Numbers, factor: float) -> Numbers:
        """A group's numbers at k times the batch."""
        found = {**own, "lr": own["lr"] * factor}
        formulas = {name: getattr(self.rule, name) for name in ("beta1", "beta2")}
        formulas |= {"alpha": self.rule.beta2, "eps": self.rule.eps}
        for name, formula in formulas.items():
            if name in own and formula is not None:
                found[name] = formula(own[name], self.k)
        if "weight_decay" in own:
            found["weight_decay"] = own["weight_decay"] * self.decay
        return found

    def _own_now(self) -> list[Numbers]:
        """Each group's numbers for the reference batch.

        What somebody has set since it was scaled counts as scaled, and so do the rates
        of a new group.
        """
        found: list[Numbers] = []
        factors = {"lr": self.factor, "weight_decay": self.decay}
        for index, now in enumerate(self._numbers()):
            if index >= len(self._written):
                found.append({**now, "lr": now["lr"] / self.factor})
                continue
            written, own = self._written[index], self._own[index]
            found.append(
                {
                    name: _own(value, written[name], own[name], factors.get(name, 1.0))
                    for name, value in now.items()
                }
            )
        return found

    def check_reach(self, k: float) -> None:
        """Refuse a k that the rule cannot follow."""
        for group, own in zip(
            self.optimizer.param_groups, self._own_now(), strict=True
        ):
            lowest = group.get("base_momentum", own.get("beta1"))  # of a cycle
            self.rule.check_reach(lowest, own.get("beta2", own.get("alpha")), k)

    def values(self) -> dict[str, tuple[float, float]]:
        """Each scaled value, as (for the reference batch, now)."""
        found: dict[str, tuple[float, float]] = {}
        groups = self.optimizer.param_groups
        for index, (group, own) in enumerate(zip(groups, self._own_now(), strict=True)):
            prefix = f"group_{index}/" if len(groups) > 1 else ""
            key = next((key for key in ("max_lr", "initial_lr") if key in group), "lr")
            rate = float(own["lr"] if key == "lr" else group[key])
            found[prefix + key.removeprefix("initial_")] = rate, rate * self.target
            for name, value in self._scaled(own, self.target).items():
                if name != "lr" and value != own[name]:
                    found[prefix + name] = float(own[name]), float(value)
        return found

    def summary(self) -> str:
        """The scaled values as text: `lr 0.1 -> 0.2, weight_decay 0.01 -> 0.02`."""
        texts = [
            f"{name} {brief(before)} -> {brief(after)}"
            for name, (before, after) in self.values().items()
        ]
        more = f", and {len(texts) - 6} more" if len(texts) > 6 else ""
        return ", ".join(texts[:6]) + more

    def _refuse_unsuitable(self) -> None:
        name, groups = type(self.optimizer).__name__, self._numbers()
        if not all("lr" in group for group in groups):
            raise TrainkitError(
                f"LRScaling: each group of {name} must have a number as its lr, "
                f"received {[g.get('lr') for g in self.optimizer.param_groups]}. Give "
                f"it one, or leave LRScaling out."
            )
        has_moments = all("beta1" in group or "alpha" in group for group in groups)
        if self.rule.beta2 is not None and (not has_moments or "SGD" in name):
            raise TrainkitError(  # ASGD's alpha is not a moment
                f"LRScaling rule={self.rule.name!r}: it scales Adam's moments, and "
                f"{name} has no betas. Use 'linear' for SGD, or 'auto'."
            )
        if self._weight_decay != "time-scale" or "Adam" not in name:
            return
        is_adamw = "AdamW" in {cls.__name__ for cls in type(self.optimizer).__mro__}
        for group in self.optimizer.param_groups:
            decoupled = group.get("decoupled_weight_decay", is_adamw)
            if group.get("weight_decay") and not decoupled:
                raise TrainkitError(
                    f"LRScaling weight_decay='time-scale': {name} adds weight decay to "
                    f"the gradient and then divides by the gradient's size, so that "
                    f"weights have no time scale. Use AdamW, or another rule."
                )


class UnscaledScheduler:
    """Stands for a scheduler of a scaled optimizer, whose methods see the user's rates.

    In all else it is that scheduler, also to `isinstance`.
    """

    def __init__(self, scheduler: Any, scaled: ScaledOptimizer) -> None:
        vars(self).update(_scheduler=scheduler, _scaled=scaled)

    def get_last_lr(self) -> list[Any]:
        return [self._scaled.factor * rate for rate in self._scheduler.get_last_lr()]

    @property
    def __class__(self) -> Any:  # type: ignore[override]  # object's can be set
        return type(self._scheduler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # a copy has no scheduler yet
        found = getattr(self._scheduler, name)
        return partial(self._call, found) if ismethod(found) else found

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._scaled.unscaled():
            return method(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._scheduler, name, value)


_LEFT: WeakSet[ScaledOptimizer] = WeakSet()
"""Optimizers that a `fit` has left scaled, for those who look at its rates."""


def leave_scaled(scaled: Sequence[ScaledOptimizer]) -> None:
    """Remember the optimizers that are still scaled when their `fit` ends."""
    _LEFT.update(scaled)


def release_left() -> None:
    """Undo the scaling of earlier `fit`s: `configure_optimizers` may return the old
    optimizer again, under new schedulers."""
    while _LEFT:
        _LEFT.pop().release()


def _numbers(group: Mapping[str, Any]) -> Numbers:
    """The numbers of a group: tensors as copies."""
    betas = zip(BETAS, group.get("betas", ()), strict=False)
    names = ("weight_decay", "eps", *(() if "betas" in group else ("alpha",)))
    others = {name: group[name] for name in names if name in group}
    found = {"lr": group.get("lr"), **dict(betas), **others}
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in found.items()
        if isinstance(value, float | int | Tensor)
    }


def _write(group: dict[str, Any], numbers: Numbers, *, in_place: bool = True) -> None:
    def put(held: Any, value: Any) -> Any:
        if in_place and isinstance(held, Tensor):
            return held.copy_(value)  # a compiled optimizer keeps its address
        return value

    numbers = dict(numbers)
    betas = [numbers.pop(name) for name in BETAS if name in numbers]
    if betas:
        kept = group["betas"][len(betas) :]
        group["betas"] = (*map(put, group["betas"], betas), *kept)
    for name, value in numbers.items():
        group[name] = put(group[name], value)


def _own(now: Any, written: Any, own: Any, factor: float) -> Any:
    """The number that was scaled; if it was changed since, the new one over the
    factor. A tensor is not read, so that nothing waits for the device."""
    if isinstance(now, Tensor):
        return torch.where(now == written, own, now / factor)
    return own if now == written else now / factor
