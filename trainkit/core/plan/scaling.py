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
from typing import Any, Literal, get_args

from trainkit.core.plan.options import check_choice, is_positive_number
from trainkit.errors import TrainkitError

RuleName = Literal["auto", "linear", "sqrt", "adam-sde", "half-life", "gain", "none"]
WeightDecayName = Literal["none", "linear", "sqrt", "time-scale"]
Factor = Callable[[float], float]
Formula = Callable[[Any, float], Any]


def same_half_life(decay: Any, k: float) -> Any:
    """decay ** k: an average forgets half of itself over as many samples as before.

    For Adam's beta2: Marek et al. 2025, arXiv 2507.07101. For a model's moving average:
    Busbridge et al. 2023, arXiv 2307.13813.
    """
    return decay**k


def sde_beta(beta: Any, k: float) -> Any:
    """1 - k (1 - beta): an average over 1 / (1 - beta) steps, over as many samples."""
    return 1 - k * (1 - beta)


@dataclass(frozen=True)
class ScalingRule:
    """The changes of an optimizer's hyperparameters at k times the batch.

    `lr` gives the factor of the rate. The others turn an old value into the new one;
    None leaves it. A rule with `beta2` needs Adam's moments.
    """

    name: str
    lr: Factor = lambda k: 1.0
    beta1: Formula | None = None
    beta2: Formula | None = None
    eps: Formula | None = None

    def check_reach(self, beta1: Any, beta2: Any, k: float) -> None:
        """Refuse a k at which a moment would average over less than one step.

        The betas are those for the reference batch; None if there is no such moment.
        """
        for formula, beta in (self.beta1, beta1), (self.beta2, beta2):
            scaled = 1.0 if formula is None or beta is None else formula(beta, k)
            if scaled < 1e-12:  # it could not be scaled back
                raise TrainkitError(
                    f"LRScaling rule={self.name!r}: every beta must stay above 0, and "
                    f"with k = {k:g} beta = {beta:g} becomes {scaled:.3g}: the moment "
                    f"would average over less than one step. Use rule='sqrt', a larger "
                    f"beta or a smaller batch."
                )


RULES = {
    rule.name: rule
    for rule in (
        # SGD: k small steps with rate lr, over gradients that hardly differ, equal one
        # with k lr (Goyal et al. 2017, arXiv 1706.02677).
        ScalingRule("linear", lambda k: k),
        # The Adam family; with the moments, and with eps, which falls as the gradient's
        # noise, it is adam-sde (Malladi et al. 2022, arXiv 2205.10287).
        ScalingRule("sqrt", math.sqrt),
        ScalingRule("none"),
        ScalingRule("half-life", beta2=same_half_life),
        ScalingRule(
            "adam-sde", math.sqrt, sde_beta, sde_beta, lambda eps, k: eps / math.sqrt(k)
        ),
    )
}


def check_rules(rule: object, weight_decay: object = "none") -> None:
    """Refuse what is neither the name of a rule nor a callable."""
    for name, value, names in (
        ("rule", rule, get_args(RuleName)),
        ("weight_decay", weight_decay, get_args(WeightDecayName)),
    ):
        if not callable(value):
            text = " or a callable that takes k and returns a factor"
            check_choice(f"LRScaling {name}", value, names, or_else=text)


def make_rule(
    rule: str | Factor,
    optimizer_class: type = object,
    *,
    noise_scale: float | None = None,
    reference_batch: float = 1.0,
) -> ScalingRule:
    """The rule of this name, or a rule from a callable.

    `"auto"` and `"gain"` ask the optimizer: linear for SGD, sqrt for the Adam family.
    `"gain"` goes by what a step gains, in place of k; it needs the noise scale and the
    reference batch, in samples.

    >>> Adam = type("Adam", (), {})
    >>> slow = make_rule("gain", Adam, noise_scale=48, reference_batch=16)
    >>> slow.name, [round(slow.lr(k), 3) for k in (1, 3, 1e9)]
    ('gain: sqrt', [1.0, 1.414, 2.0])
    """
    check_rules(rule)
    if callable(rule):
        return ScalingRule(getattr(rule, "__name__", type(rule).__name__), rule)
    if rule in RULES:
        return RULES[rule]
    kind = _kind_of(optimizer_class, rule)
    if rule == "auto":
        return kind
    assert noise_scale is not None  # LRScaling asks for it

    def factor(k: float) -> float:
        return kind.lr(gain(noise_scale, reference_batch, k * reference_batch))

    return ScalingRule(f"gain: {kind.name}", factor)


def _kind_of(optimizer_class: type, rule: str) -> ScalingRule:
    """Linear for SGD, sqrt for the Adam family.

    The names of the class and its bases decide, so that another library's `FusedAdam`
    or `SGD8bit` is recognised too.
    """
    for cls in optimizer_class.__mro__:
        if "SGD" in cls.__name__:
            return RULES["linear"]
        if any(kin in cls.__name__ for kin in ("Adam", "RMSprop", "Adagrad")):
            return RULES["sqrt"]
    raise TrainkitError(
        f"LRScaling rule={rule!r}: knows SGD (linear) and the Adam family (sqrt), "
        f"received {optimizer_class.__name__}. Name the rule: 'linear', 'sqrt', 'none' "
        f"or a callable."
    )


def gain(noise_scale: float, reference: float, window: float) -> float:
    """How many times as far a step may go as one of a reference window.

    The progress of a step over that of the reference's: k for windows far below the
    noise scale, level above it (McCandlish et al. 2018, arXiv 1812.06162).

    >>> gain(40, 16, 16), round(gain(1e9, 16, 128), 3), round(gain(40, 16, 1e9), 3)
    (1.0, 8.0, 3.5)
    """
    return (1 + noise_scale / reference) / (1 + noise_scale / window)


def decay_factor(rule: str | Factor, k: float, lr_factor: float) -> float:
    """The factor of weight decay at k times the batch.

    With `"time-scale"` weights decay equally fast per sample. One step removes
    lr * decay of the weights, and one new step replaces k old ones. So lr * decay must
    grow k-fold, and the rate has grown by `lr_factor` already (Wang and Aitchison 2024,
    arXiv 2405.13698: keep B / (lr * decay * D)).

    >>> [decay_factor("time-scale", 4, lr_factor) for lr_factor in (4, 2)]
    [1.0, 2.0]
    """
    if rule == "time-scale":
        return k / lr_factor
    factor = RULES[rule].lr if isinstance(rule, str) else rule
    return checked_factor("weight_decay", factor, k)


def checked_factor(rule: str, factor: Factor, k: float) -> float:
    """The factor for k, checked, since a user's callable may be wrong."""
    value = factor(k)
    if not is_positive_number(value):
        raise TrainkitError(
            f"LRScaling {rule}: the factor must be a positive number, and for k = "
            f"{k:g} it returned {value!r}."
        )
    return float(value)


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
