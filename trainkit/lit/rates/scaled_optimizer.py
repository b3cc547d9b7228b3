"""An optimizer and its schedulers, held at scaled learning rates."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.optim.swa_utils import SWALR

from trainkit.core.plan.options import brief
from trainkit.core.plan.rates import Change
from trainkit.core.plan.scaling import (
    RULES,
    ScalingRule,
    checked_factor,
    decay_factor,
    make_rule,
    warmed_up,
)
from trainkit.errors import TrainkitError


class ScaledOptimizer:
    """Holds an optimizer at the rates for k times the reference batch.

    Each change multiplies the present values by a ratio. So scaling can continue from
    any point of a curve: from the rates in a checkpoint, or from those that a scheduler
    has set since.

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
        configs: Sequence[Any],
        *,
        rule: str | Callable[[float], float],
        weight_decay: str | Callable[[float], float],
        scheduler_rates: Sequence[str],
        noise_scale: float | None = None,
        reference_batch: float = 1.0,
    ) -> None:
        self.optimizer = optimizer
        self.schedulers = _schedulers_of(optimizer, configs)
        self.rule: ScalingRule = make_rule(
            rule,
            type(optimizer),
            noise_scale=noise_scale,
            reference_batch=reference_batch,
        )
        self._weight_decay = weight_decay
        self._scheduler_rates = scheduler_rates
        self.factor = self.target = self.decay = 1.0
        self.k = 1.0
        self._num_groups = len(optimizer.param_groups)
        self._refuse_unsuitable()

    def adopt(self, configs: Sequence[Any]) -> None:
        """Scale what has been added during training.

        Finetuning adds groups of parameters, and `StochasticWeightAveraging` replaces
        the schedulers by its own.
        """
        self._take_in_new_groups()
        found = _schedulers_of(self.optimizer, configs)
        for scheduler in found:
            if scheduler not in self.schedulers and isinstance(scheduler, SWALR):
                # It starts from rates that are scaled; the rate it ends at is not.
                for group in self.optimizer.param_groups:
                    group["swa_lr"] = group["swa_lr"] * self.factor
        self.schedulers = found

    def _take_in_new_groups(self) -> None:
        new = self.optimizer.param_groups[self._num_groups :]
        self._num_groups += len(new)
        if not new:
            return
        for group in new:
            self._change(self.k, self.decay).apply_to_moments(group)
        if self.factor == 1:
            return
        warnings.warn(
            f"{type(self.optimizer).__name__}: {len(new)} group(s) of parameters were "
            f"added during training. LRScaling leaves their rates unchanged, because "
            f"they may come from rates that are scaled already. If you gave a rate for "
            f"the reference batch, multiply it by {self.factor:g}.",
            stacklevel=2,
        )

    def follow(self, k: float, *, step: int, warmup_steps: int) -> None:
        """Scale to k times the reference batch, or to this step of the warm-up."""
        self._take_in_new_groups()
        self.check_reach(k)
        self.target = checked_factor(f"rule {self.rule.name}", self.rule.lr, k)
        factor = warmed_up(self.target, step, warmup_steps)
        if factor != self.factor:
            ratio = factor / self.factor
            change = Change(rate=lambda rate: rate * ratio)
            change.apply(self.optimizer, self.schedulers, also=self._scheduler_rates)
            self.factor = factor
        decay = decay_factor(self._weight_decay, k, self.rule.lr(k))
        if (k, decay) != (self.k, self.decay):
            change = self._change(k / self.k, decay / self.decay)
            change.apply(self.optimizer, self.schedulers)
            self.k, self.decay = k, decay

    def check_reach(self, k: float) -> None:
        """Refuse a k that the rule cannot follow."""
        back = self._change(1 / self.k, 1.0)
        for group in self.optimizer.param_groups:
            original = _changed_copy(group, back)
            beta1, beta2, *_ = original.get("betas", (None, original.get("alpha")))
            lowest = original.get("base_momentum", beta1)  # of a cycle
            self.rule.check_reach(lowest, beta2, k)

    def values(self) -> dict[str, tuple[float, float]]:
        """Each scaled value, as (for the reference batch, now)."""
        found: dict[str, tuple[float, float]] = {}
        groups = self.optimizer.param_groups
        back = self._change(1 / self.k, 1 / self.decay)
        for index, group in enumerate(groups):
            prefix = f"group_{index}/" if len(groups) > 1 else ""
            key = next(k for k in ("max_lr", "initial_lr", "lr") if k in group)
            rate = float(group[key]) / self.factor
            found[prefix + key.removeprefix("initial_")] = rate, rate * self.target
            now = self._numbers(group)
            then = self._numbers(_changed_copy(group, back))
            for name, value in now.items():
                if value != then[name]:
                    found[prefix + name] = then[name], value
        return found

    def summary(self) -> str:
        """The scaled values as text: `lr 0.1 -> 0.2, weight_decay 0.01 -> 0.02`."""
        texts = [
            f"{name} {brief(before)} -> {brief(after)}"
            for name, (before, after) in self.values().items()
        ]
        more = f", and {len(texts) - 6} more" if len(texts) > 6 else ""
        return ", ".join(texts[:6]) + more

    def state_dict(self) -> dict[str, Any]:
        return {
            "rule": self.rule.name,
            "factor": self.factor,
            "decay": self.decay,
            "k": self.k,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over how far the optimizer in a checkpoint was scaled already."""
        self.factor, self.decay, self.k = state["factor"], state["decay"], state["k"]
        if state["rule"] != self.rule.name:  # undo what the old rule did to moments
            new, self.rule = self.rule, RULES.get(state["rule"], RULES["none"])
            change = self._change(1 / self.k, 1.0)
            change.apply(self.optimizer, self.schedulers)
            self.rule, self.k = new, 1.0

    def _change(self, ratio: float, decay_ratio: float) -> Change:
        """The change of moments by a ratio of k, and of weight decay by a ratio."""
        change = {}
        for name in ("beta1", "beta2", "eps"):
            formula = getattr(self.rule, name)
            if formula is not None:
                change[name] = lambda value, formula=formula: formula(value, ratio)
        if decay_ratio != 1:
            change["weight_decay"] = lambda value: value * decay_ratio
        return Change(**change)

    @staticmethod
    def _betas(group: dict[str, Any]) -> list[float]:
        betas = group["betas"] if "betas" in group else [group.get("alpha")]
        return [float(beta) for beta in betas if beta is not None]

    def _numbers(self, group: dict[str, Any]) -> dict[str, float]:
        names = ["beta1", "beta2", "beta3"] if "betas" in group else ["alpha"]
        found = dict[str, float](zip(names, self._betas(group), strict=False))
        for name in ("weight_decay", "eps"):
            if isinstance(group.get(name), float | Tensor):
                found[name] = float(group[name])
        return found

    def _refuse_unsuitable(self) -> None:
        groups = self.optimizer.param_groups
        name = type(self.optimizer).__name__
        has_moments = "SGD" not in name and all(map(self._betas, groups))
        if self.rule.needs_adam and not has_moments:  # ASGD's alpha is not a moment
            raise TrainkitError(
                f"LRScaling rule={self.rule.name!r}: it scales Adam's moments, and "
                f"{name} has no betas. Use 'linear' for SGD, or 'auto'."
            )
        if self._weight_decay != "time-scale" or "Adam" not in name:
            return
        classes = {cls.__name__ for cls in type(self.optimizer).__mro__}
        for group in groups:
            decoupled = group.get("decoupled_weight_decay", "AdamW" in classes)
            if group.get("weight_decay") and not decoupled:
                raise TrainkitError(
                    f"LRScaling weight_decay='time-scale': {name} adds weight decay to "
                    f"the gradient and then divides by the gradient's size, so that "
                    f"weights have no time scale. Use AdamW, or another rule."
                )


_LEFT_SCALED: WeakSet[Any] = WeakSet()
"""Optimizers that a `fit` has left scaled. Each holds its `ScaledOptimizer`, since a
weak dictionary whose values hold its keys would keep both alive."""


def leave_scaled(scaled: ScaledOptimizer) -> None:
    """Remember an optimizer that is still scaled when its `fit` ends."""
    scaled.optimizer.trainkit_scaling = scaled
    _LEFT_SCALED.add(scaled.optimizer)


def unscale_leftovers(module: Any) -> None:
    """Undo the scaling that an earlier `fit` left in optimizers of this module.

    `configure_optimizers` may return the old optimizer again, under new schedulers.
    """
    own = {id(parameter) for parameter in module.parameters()}
    for optimizer in list(_LEFT_SCALED):
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if any(id(parameter) in own for parameter in held):
            optimizer.trainkit_scaling.follow(1.0, step=0, warmup_steps=0)
            _LEFT_SCALED.discard(optimizer)


def _schedulers_of(optimizer: Any, configs: Sequence[Any]) -> list[Any]:
    schedulers = [config.scheduler for config in configs]
    return [each for each in schedulers if each.optimizer is optimizer]


def _changed_copy(group: dict[str, Any], change: Change) -> dict[str, Any]:
    """A copy of a group's numbers with the change applied."""
    copy = {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key != "params"
    }
    change.apply_to_moments(copy)
    return copy
