"""Rules that scale hyperparameters with the batch, each with its paper.

k is the effective batch over the reference batch. Each formula turns the value for a
batch into the value for a batch k times as large. Using it for k and then for j equals
using it once for k * j, so a batch that changes in mid-training only needs the ratio.
Rates need the factor for k itself: `gain`, and a user's callable, do not multiply so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

from trainkit.core.noise.estimate import gain
from trainkit.errors import TrainkitError

RuleName = Literal["auto", "linear", "sqrt", "adam-sde", "half-life", "gain", "none"]
WeightDecayName = Literal["none", "linear", "sqrt", "time-scale"]
Factor = Callable[[float], float]


def linear_factor(k: float) -> float:
    """SGD: k times the rate (Goyal et al. 2017, arXiv 1706.02677).

    k small steps with rate lr, over gradients that hardly differ, equal one with k lr.

    >>> linear_factor(8)
    8
    """
    return k


def sqrt_factor(k: float) -> float:
    """The Adam family: the root of k (Malladi et al. 2022, arXiv 2205.10287).

    >>> sqrt_factor(4)
    2.0
    """
    return math.sqrt(k)


def sde_beta(beta: Any, k: float) -> Any:
    """Adam's moments: 1 - k (1 - beta) (Malladi et al. 2022, arXiv 2205.10287).

    An average over 1 / (1 - beta) steps becomes one over as many samples.

    >>> round(sde_beta(0.9, 4), 12)
    0.6
    """
    return 1 - k * (1 - beta)


def sde_eps(eps: float, k: float) -> float:
    """Adam's eps / sqrt(k), as the gradient's noise falls (Malladi et al. 2022).

    >>> sde_eps(1e-8, 4)
    5e-09
    """
    return eps / math.sqrt(k)


def half_life_beta(beta2: Any, k: float) -> Any:
    """Adam's beta2 ** k: the second moment forgets half of itself over as many tokens
    as before (Marek et al. 2025, arXiv 2507.07101).

    >>> half_life_beta(0.5, 2)
    0.25
    """
    return beta2**k


def ema_decay(decay: Any, k: float) -> Any:
    """A model average's decay ** k (Busbridge et al. 2023, arXiv 2307.13813).

    >>> ema_decay(0.5, 2)
    0.25
    """
    return decay**k


def time_scale_weight_decay(k: float, lr_factor: float) -> float:
    """The factor of weight decay with which weights decay equally fast per sample.

    One step removes lr * decay of the weights, and one new step replaces k old ones. So
    lr * decay must grow k-fold, and the rate has grown by `lr_factor` already (Wang and
    Aitchison 2024, arXiv 2405.13698: keep B / (lr * decay * D)).

    >>> time_scale_weight_decay(4, linear_factor(4)), time_scale_weight_decay(4, 2.0)
    (1.0, 2.0)
    """
    return k / lr_factor


@dataclass(frozen=True)
class ScalingRule:
    """The changes of an optimizer's hyperparameters at k times the batch.

    Attributes:
        name: as the user wrote it.
        lr: the factor of the rate.
        beta1: the new decay of the first moment; None leaves it.
        beta2: the new decay of the second moment; None leaves it.
        eps: the new eps; None leaves it.
        needs_adam: whether the rule needs Adam's moments.
    """

    name: str
    lr: Factor
    beta1: Callable[[Any, float], Any] | None = None
    beta2: Callable[[Any, float], Any] | None = None
    eps: Callable[[float, float], float] | None = None
    needs_adam: bool = False


def _factor_of_one(k: float) -> float:
    return 1.0


RULES = {
    "linear": ScalingRule("linear", linear_factor),
    "sqrt": ScalingRule("sqrt", sqrt_factor),
    "none": ScalingRule("none", _factor_of_one),
    "half-life": ScalingRule(
        "half-life", _factor_of_one, beta2=half_life_beta, needs_adam=True
    ),
    "adam-sde": ScalingRule(
        "adam-sde",
        sqrt_factor,
        beta1=sde_beta,
        beta2=sde_beta,
        eps=sde_eps,
        needs_adam=True,
    ),
}

WEIGHT_DECAY = {name: RULES[name].lr for name in ("linear", "sqrt", "none")}


def make_rule(rule: str | Factor) -> ScalingRule | None:
    """The rule of this name, or a rule from a callable.

    Returns:
        None for `"auto"` and `"gain"`, which ask the optimizer: see `rule_for`.

    Raises:
        TrainkitError: there is no rule of this name.
    """
    if callable(rule):
        return ScalingRule(getattr(rule, "__name__", type(rule).__name__), rule)
    if rule in ("auto", "gain"):
        return None
    if rule not in RULES:
        raise TrainkitError(
            f"LRScaling rule: must be one of {list(get_args(RuleName))} or a callable "
            f"that takes k and returns the rate's factor, received {rule!r}."
        )
    return RULES[rule]


def check_weight_decay(weight_decay: object) -> None:
    if not callable(weight_decay) and weight_decay not in get_args(WeightDecayName):
        raise TrainkitError(
            f"LRScaling weight_decay: must be one of {list(get_args(WeightDecayName))} "
            f"or a callable that takes k and returns a factor, received "
            f"{weight_decay!r}."
        )


def rule_for(
    optimizer_class: type,
    *,
    noise_scale: float | None = None,
    reference_batch: float = 1.0,
) -> ScalingRule:
    """The rule that `"auto"` chooses: linear for SGD, sqrt for the Adam family.

    With a noise scale it is the rule `"gain"`, of the same kind. The names of the class
    and its bases decide, so that another library's `FusedAdam` or `SGD8bit` is
    recognised too.

    Raises:
        TrainkitError: the class is of neither kind.
    """
    for cls in optimizer_class.__mro__:
        is_adam = any(kin in cls.__name__ for kin in ("Adam", "RMSprop", "Adagrad"))
        if is_adam or "SGD" in cls.__name__:
            rule = RULES["linear" if "SGD" in cls.__name__ else "sqrt"]
            if noise_scale is None:
                return rule
            return gain_rule(rule, noise_scale, reference_batch)
    raise TrainkitError(
        f"LRScaling rule={'auto' if noise_scale is None else 'gain'!r}: knows SGD "
        f"(linear) and the Adam family (sqrt), received {optimizer_class.__name__}. "
        f"Name the rule: 'linear', 'sqrt', 'none' or a callable."
    )


def gain_rule(
    rule: ScalingRule, noise_scale: float, reference_batch: float
) -> ScalingRule:
    """A rule of the rate that goes by what a step gains, in place of k.

    >>> slow = gain_rule(RULES["sqrt"], noise_scale=48, reference_batch=16)
    >>> slow.name, [round(slow.lr(k), 3) for k in (1, 3, 1e9)]
    ('gain: sqrt', [1.0, 1.414, 2.0])

    Args:
        rule: `linear` for SGD, `sqrt` for the Adam family.
        noise_scale: in samples.
        reference_batch: in samples.
    """

    def factor(k: float) -> float:
        return rule.lr(gain(noise_scale, reference_batch, k * reference_batch))

    return ScalingRule(f"gain: {rule.name}", factor)


def checked_factor(rule: str, factor: Factor, k: float) -> float:
    """The factor for k, checked, since a user's callable may be wrong."""
    value = factor(k)
    if not isinstance(value, Real) or not (0 < value < math.inf):  # type: ignore[operator]
        raise TrainkitError(
            f"LRScaling {rule}: the factor must be a positive number, and for k = "
            f"{k:g} it returned {value!r}."
        )
    return float(value)


def refuse_sde_overreach(rule: ScalingRule, beta: float, k: float) -> None:
    """Refuse a k at which a moment would average over less than one step."""
    if rule.needs_adam and rule.eps is not None and k * (1 - beta) >= 1:
        raise TrainkitError(
            f"LRScaling rule='adam-sde': k (1 - beta) must be below 1, and with k = "
            f"{k:g} and beta = {beta:g} it is {k * (1 - beta):g}: the moment would "
            f"average over less than one step. The rule holds up to "
            f"k = {1 / (1 - beta):g}; use rule='sqrt', a larger beta or a smaller "
            f"batch."
        )


def refuse_lost_half_life(beta2: float, k: float) -> None:
    """Refuse a k at which beta2 would become 0, from which it cannot return."""
    if half_life_beta(beta2, k) < 1e-12:
        raise TrainkitError(
            f"LRScaling rule='half-life': beta2 must stay above 0, and {beta2:g} ** "
            f"{k:g} is 0: the second moment would forget everything in every step. Use "
            f"rule='sqrt', a larger beta2 or a smaller batch."
        )


def warmed_up(factor: float, step: int, warmup_steps: int) -> float:
    """The factor during a warm-up from 1 (Goyal et al. 2017, section 2.2).

    A factor below 1 holds at once: beginning with the larger rate would be the opposite
    of a warm-up.

    >>> [warmed_up(3.0, step, 4) for step in range(6)]
    [1.0, 1.5, 2.0, 2.5, 3.0, 3.0]
    """
    if step >= warmup_steps or factor <= 1:
        return factor
    return 1 + (factor - 1) * step / warmup_steps
