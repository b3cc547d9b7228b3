"""One optimizer, its schedulers, and what scaling has made of them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.optim.swa_utils import SWALR

from trainkit.core.effective import brief
from trainkit.core.learning_rates import GroupChange, multiply_rates
from trainkit.core.scaling import (
    RULES,
    WEIGHT_DECAY,
    ScalingRule,
    checked_factor,
    half_life_beta,
    make_rule,
    refuse_lost_half_life,
    refuse_sde_overreach,
    rule_for,
    time_scale_weight_decay,
    warmed_up,
)
from trainkit.errors import TrainkitError

SHOWN = ("weight_decay", "eps")


class ScaledOptimizer:
    """Holds an optimizer at the rates of k times the reference batch.

    Only ratios are ever applied, so that it can go on from any point of a curve: what
    a checkpoint brought back, or what a scheduler has made of the rates since.

    Attributes:
        optimizer: torch's own.
        rule: what `"auto"` has become.
        factor: by what its rates stand multiplied.
        target: where that goes, after a warm-up.
        k: for which batch its moments stand.
        decay: by what its weight decay stands multiplied.
    """

    def __init__(
        self,
        optimizer: Any,
        configs: Sequence[Any],
        *,
        rule: str | Callable[[float], float],
        weight_decay: str | Callable[[float], float],
        scheduler_rates: Sequence[str],
    ) -> None:
        self.optimizer = optimizer
        self.schedulers = _schedulers_of(optimizer, configs)
        self.rule: ScalingRule = make_rule(rule) or rule_for(type(optimizer))
        self._weight_decay = weight_decay
        self._scheduler_rates = scheduler_rates
        self.factor = self.target = self.decay = 1.0
        self.k = 1.0
        self._num_groups = len(optimizer.param_groups)
        self._refuse_unsuitable()

    def adopt(self, configs: Sequence[Any]) -> None:
        """Take in what has come in the middle of training: groups of a finetuning,
        or the scheduler that `StochasticWeightAveraging` puts in place of others."""
        self._take_in_new_groups()
        found = _schedulers_of(self.optimizer, configs)
        for scheduler in found:
            if scheduler not in self.schedulers and isinstance(scheduler, SWALR):
                # The rates that it found are scaled; the one to go to is not.
                for group in self.optimizer.param_groups:
                    group["swa_lr"] = group["swa_lr"] * self.factor
        self.schedulers = found

    def _take_in_new_groups(self) -> None:
        """Finetuning adds groups later on."""
        new = self.optimizer.param_groups[self._num_groups :]
        self._num_groups += len(new)
        if not new:
            return
        k, decay = self.k, self.decay
        self.k = self.decay = 1.0
        for group in new:
            self._change_others(k, decay).apply_to(group)
        self.k, self.decay = k, decay
        if self.factor == 1:
            return
        warnings.warn(
            f"{type(self.optimizer).__name__}: {len(new)} group(s) of parameters were "
            f"added while it trains. LRScaling takes their rates as they stand, since "
            f"those may come from rates that are scaled already: where you give a rate "
            f"for the reference batch, multiply it by {self.factor:g}.",
            stacklevel=2,
        )

    def follow(self, k: float, *, step: int, warmup_steps: int) -> None:
        """Scale to k times the reference batch, or a warm-up step towards it."""
        self._take_in_new_groups()
        self.check_reach(k)
        self.target = checked_factor(f"rule {self.rule.name}", self.rule.lr, k)
        factor = warmed_up(self.target, step, warmup_steps)
        if factor != self.factor:
            multiply_rates(
                [self.optimizer],
                self.schedulers,
                factor / self.factor,
                also=self._scheduler_rates,
            )
            self.factor = factor
        decay = self._decay_factor(k)
        if (k, decay) != (self.k, self.decay):
            change = self._change_others(k, decay)
            change.apply([self.optimizer], self.schedulers)
            self.k, self.decay = k, decay

    def check_reach(self, k: float) -> None:
        """Refuse a k that the rule cannot follow."""
        if self.rule.beta2 is half_life_beta:
            for group in self.optimizer.param_groups:
                original = half_life_beta(self._betas(group)[-1], 1 / self.k)
                refuse_lost_half_life(original, k)
        for group in self.optimizer.param_groups:
            betas = self._betas(group)
            if "betas" in group and "base_momentum" in group:
                betas.append(float(group["base_momentum"]))  # the lowest of a cycle
            for beta in betas:
                # What it was for the reference batch: 1 - beta grows by k.
                original = 1 - (1 - beta) / self.k
                refuse_sde_overreach(self.rule, original, k)

    def values(self) -> dict[str, tuple[float, float]]:
        """Each scaled value for the reference batch, and as it is now."""
        found: dict[str, tuple[float, float]] = {}
        groups = self.optimizer.param_groups
        for index, group in enumerate(groups):
            prefix = f"group_{index}/" if len(groups) > 1 else ""
            key = next(k for k in ("max_lr", "initial_lr", "lr") if k in group)
            rate = float(group[key]) / self.factor
            found[prefix + key.removeprefix("initial_")] = rate, rate * self.target
            back = self._change_others(1.0, 1.0)
            now = self._numbers(group)
            then = self._numbers(_copied(group, back))
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
        """Say what a checkpoint has brought back into the optimizer."""
        self.factor, self.decay, self.k = state["factor"], state["decay"], state["k"]
        if state["rule"] != self.rule.name:  # moments belong to the rule: undo its own
            new, self.rule = self.rule, RULES.get(state["rule"], RULES["none"])
            change = self._change_others(1.0, self.decay)
            change.apply([self.optimizer], self.schedulers)
            self.rule, self.k = new, 1.0

    def _change_others(self, k: float, decay: float) -> GroupChange:
        ratio, rule, change = k / self.k, self.rule, {}
        for name in ("beta1", "beta2", "eps"):
            formula = getattr(rule, name)
            if formula is not None:
                change[name] = functools.partial(_apply, formula, ratio)
        if decay != self.decay:
            change["weight_decay"] = lambda value: value * (decay / self.decay)
        return GroupChange(**change)

    def _decay_factor(self, k: float) -> float:
        rule = self._weight_decay
        if rule == "time-scale":
            return time_scale_weight_decay(k, self.rule.lr(k))
        factor = WEIGHT_DECAY[rule] if isinstance(rule, str) else rule
        return checked_factor("weight_decay", factor, k)

    @staticmethod
    def _betas(group: dict[str, Any]) -> list[float]:
        betas = group["betas"] if "betas" in group else [group.get("alpha")]
        return [float(beta) for beta in betas if beta is not None]

    def _numbers(self, group: dict[str, Any]) -> dict[str, float]:
        names = ["beta1", "beta2", "beta3"] if "betas" in group else ["alpha"]
        found = dict[str, float](zip(names, self._betas(group), strict=False))
        shown = {name: group[name] for name in SHOWN if name in group}
        found.update(
            {n: float(v) for n, v in shown.items() if isinstance(v, float | Tensor)}
        )
        return found

    def _refuse_unsuitable(self) -> None:
        groups = self.optimizer.param_groups
        name = type(self.optimizer).__name__
        has_moments = "SGD" not in name and all(map(self._betas, groups))
        if self.rule.needs_adam and not has_moments:  # ASGD's alpha is none
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


LEFT_SCALED: WeakSet[Any] = WeakSet()
"""Optimizers that a fit has left scaled, kept so that a later fit can unscale them."""


def leave_scaled(scaled: ScaledOptimizer) -> None:
    """Remember that an optimizer stands scaled when its fit is over."""
    scaled.optimizer.trainkit_scaling = scaled
    LEFT_SCALED.add(scaled.optimizer)


def unscale_leftovers(module: Any) -> None:
    """Bring back the optimizers of a module that an earlier fit has left scaled: the
    module may return the very same ones again, under new schedulers."""
    own = {id(parameter) for parameter in module.parameters()}
    for optimizer in list(LEFT_SCALED):
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if any(id(parameter) in own for parameter in held):
            optimizer.trainkit_scaling.follow(1.0, step=0, warmup_steps=0)
            LEFT_SCALED.discard(optimizer)


def _schedulers_of(optimizer: Any, configs: Sequence[Any]) -> list[Any]:
    schedulers = [config.scheduler for config in configs]
    return [each for each in schedulers if each.optimizer is optimizer]


def _apply(formula: Callable[[Any, float], Any], ratio: float, value: Any) -> Any:
    return formula(value, ratio)


def _copied(group: dict[str, Any], change: GroupChange) -> dict[str, Any]:
    """A group's numbers as the change would leave them, the group as it was."""
    copy = {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key != "params"
    }
    change.apply([_Holder(copy)], [])
    return copy


class _Holder:
    def __init__(self, group: dict[str, Any]) -> None:
        self.param_groups = [group]
