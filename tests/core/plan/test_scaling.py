"""Each formula equals its paper's, and going by k and then by j equals once by k j; a
curve that torch lacks."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR

from trainkit import TrainkitError, warmup_cosine
from trainkit.core.plan.rates import WarmupCosine
from trainkit.core.plan.scaling import (
    RULES,
    ScalingRule,
    check_rules,
    checked_factor,
    decay_factor,
    make_rule,
    same_half_life,
    warmed_up,
)

KS = (0.25, 1, 2, 3, 8)
FORMULAS: dict[tuple[str, str], Any] = {  # the papers': of the value, and k
    ("linear", "lr"): lambda lr, k: k * lr,
    ("sqrt", "lr"): lambda lr, k: k**0.5 * lr,
    ("none", "lr"): lambda lr, k: lr,
    ("half-life", "lr"): lambda lr, k: lr,
    # A gradient's share falls to a half over log(1/2) / log(beta) steps.
    ("half-life", "beta2"): lambda beta, k: 0.5 ** (k * math.log(beta, 0.5)),
    ("adam-sde", "lr"): lambda lr, k: k**0.5 * lr,
    ("adam-sde", "beta1"): lambda beta, k: 1 - k * (1 - beta),
    ("adam-sde", "beta2"): lambda beta, k: 1 - k * (1 - beta),
    ("adam-sde", "eps"): lambda eps, k: eps / k**0.5,
}


@pytest.mark.parametrize(("name", "attribute"), FORMULAS)
def test_formula_is_the_papers_and_k_then_j_is_k_j(name: str, attribute: str) -> None:
    change = getattr(make_rule(name), attribute)

    def after(value: float, k: float) -> float:
        return value * change(k) if attribute == "lr" else change(value, k)

    for k, j, value in itertools.product(KS, KS, (0.95, 0.999)):
        paper = FORMULAS[name, attribute]
        assert after(value, k) == pytest.approx(paper(value, k), rel=1e-12)
        both = after(after(value, k), j)
        assert both == pytest.approx(after(value, k * j), rel=1e-12), (k, j)


def test_rules_change_no_more_than_their_formulas_say() -> None:
    for name in RULES:
        rule, parts = make_rule(name), ("lr", "beta1", "beta2", "eps")
        found = {(name, part) for part in parts if getattr(rule, part) is not None}
        assert found == {key for key in FORMULAS if key[0] == name}
        assert rule.name == name
        assert decay_factor(name, 4, lr_factor=7) == rule.lr(4)


@pytest.mark.parametrize("k", [2, 3, 8])
def test_average_over_k_equal_weights_equals_one_at_decay_to_the_k(k: int) -> None:
    """Busbridge et al. 2023: k updates towards the same weights are one of rho^k."""
    decay, average, weight = 0.9, 5.0, 2.0
    slow = average
    for _ in range(k):
        slow = decay * slow + (1 - decay) * weight
    fast = same_half_life(decay, k)
    assert fast * average + (1 - fast) * weight == pytest.approx(slow, rel=1e-12)


@pytest.mark.parametrize("k", KS)
def test_time_scale_keeps_the_decay_of_an_epoch(k: float) -> None:
    """Wang and Aitchison 2024: lr x decay a step, 1 / k as many steps."""
    for rule in RULES.values():
        lr = rule.lr(k)
        assert lr * decay_factor("time-scale", k, lr) / k == pytest.approx(1.0)
        left = lr * decay_factor("none", k, lr) / k
        assert (left == pytest.approx(1.0)) == (lr == k)


def test_a_callable_is_a_rule_of_its_own_name() -> None:
    class Own:
        def __call__(self, k: float) -> float:
            return 5 * k

    for rule, name, factor in ((math.sqrt, "sqrt", 2.0), (Own(), "Own", 20.0)):
        made = make_rule(rule)
        assert (made, made.lr(4)) == (ScalingRule(name, rule), factor)
        assert decay_factor(rule, 4, lr_factor=7) == factor
        check_rules(rule, rule)


# ---- auto and gain -------------------------------------------------------------------

KINDS = {
    "linear": "SGD ASGD SGD8bit FusedSGD",
    "sqrt": "Adam AdamW Adamax NAdam RAdam SparseAdam RMSprop Adagrad FusedAdam "
    "AdamW8bit PagedAdamW DeepSpeedCPUAdam Mine",
}


class Mine(torch.optim.AdamW):
    """Known by its bases."""


def optimizer(name: str) -> type:
    return Mine if name == "Mine" else getattr(torch.optim, name, type(name, (), {}))


def gained(name: str, noise_scale: float) -> ScalingRule:
    how = {"noise_scale": noise_scale, "reference_batch": 16.0}
    return make_rule("gain", optimizer(name), **how)


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for kind in KINDS for name in KINDS[kind].split()]
)
def test_auto_knows_optimizers_and_gain_is_alike(name: str, kind: str) -> None:
    """Well below the noise scale gain is auto's rule; near it, it is not."""
    auto, rule = make_rule("auto", optimizer(name)), gained(name, 1e9)
    assert auto is RULES[kind]
    assert rule == ScalingRule(f"gain: {kind}", rule.lr)  # moments are left
    for k in KS:
        assert rule.lr(k) == pytest.approx(auto.lr(k), rel=1e-6)
        assert gained(name, 40).lr(k) != pytest.approx(auto.lr(k), rel=0.1) or k == 1


@pytest.mark.parametrize(("name", "power"), [("SGD", 1), ("AdamW", 0.5)])
def test_gain_equals_its_formula(name: str, power: float) -> None:
    """McCandlish et al. 2018: a step goes as far as 1 / (1 + N / B) of an endless's."""
    for batch in (1, 16, 24, 128, 4096, 1e12):
        expected = ((1 + 40 / 16) / (1 + 40 / batch)) ** power
        assert gained(name, 40).lr(batch / 16) == pytest.approx(expected, rel=1e-12)
    assert gained(name, 1e-6).lr(1024) == pytest.approx(1, rel=1e-6)  # level above it


def test_gain_by_k_then_j_is_not_gain_by_their_product() -> None:
    """So a rate needs the factor for k itself, in place of a ratio of two k."""
    rule = gained("SGD", 40)
    assert rule.lr(2) * rule.lr(4) > 1.2 * rule.lr(8)
    assert rule.lr(1) == 1.0


# ---- refusals, and the warm-up -------------------------------------------------------


@pytest.mark.parametrize("rule", ["lineal", "", "LINEAR", 2, None, True])
def test_an_unknown_name_is_refused(rule: Any) -> None:
    with pytest.raises(TrainkitError, match=r"LRScaling rule: must be one of \['auto'"):
        make_rule(rule)
    for decay in (rule, "auto", "half-life"):
        with pytest.raises(TrainkitError, match=r"weight_decay: must be one of \['non"):
            check_rules("auto", decay)


@pytest.mark.parametrize("name", ["Adadelta", "Adafactor", "Rprop", "LBFGS", "Lion"])
@pytest.mark.parametrize("rule", ["auto", "gain"])
def test_an_optimizer_without_a_known_rule_is_refused(rule: str, name: str) -> None:
    with pytest.raises(TrainkitError, match=f"'{rule}': knows SGD .* {name}. Name the"):
        make_rule(rule, optimizer(name), noise_scale=40)


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, None, "2", True])
def test_an_impossible_factor_is_refused(value: Any) -> None:
    with pytest.raises(TrainkitError, match="LRScaling rule own: the factor must be a"):
        checked_factor("rule own", lambda k: value, 3)
    with pytest.raises(TrainkitError, match="weight_decay: the factor must be a"):
        decay_factor(lambda k: value, 3, 1)
    assert isinstance(checked_factor("rule own", lambda k: 3, 2), float)


@pytest.mark.parametrize(
    ("name", "beta1", "beta2", "k", "text"),
    [
        ("adam-sde", 0.9, 0.999, 9.9, None),
        ("adam-sde", 0.9, 0.999, 10.1, "k = 10.1 beta = 0.9 becomes -0.01:"),
        ("adam-sde", 0.75, None, 4, "k = 4 beta = 0.75 becomes 0:"),
        ("adam-sde", None, 0.999, 999, None),
        ("adam-sde", 0.999, 0.9, 11, "k = 11 beta = 0.9 becomes -0.1:"),
        ("half-life", 0.0, 0.99, 2000, None),
        ("half-life", 0.9, 0.99, 32768, "beta = 0.99 becomes 9.*e-144:"),
        ("sqrt", 0.0, 0.5, 1e6, None),
    ],
)
def test_a_moment_shorter_than_a_step_is_refused(
    name: str, beta1: Any, beta2: Any, k: float, text: str | None
) -> None:
    if text is None:
        RULES[name].check_reach(beta1, beta2, k)
        return
    with pytest.raises(TrainkitError, match=f"rule='{name}': every .*{text}"):
        RULES[name].check_reach(beta1, beta2, k)


@pytest.mark.parametrize("steps", [0, 1, 5, 100])
@pytest.mark.parametrize("factor", [0.1, 0.99, 1.0, 1.5, 64])
def test_warmed_up_factor_is_linear_from_one_and_one_below_it_holds_at_once(
    factor: float, steps: int
) -> None:
    found = [warmed_up(factor, step, steps) for step in range(steps + 3)]
    line = torch.linspace(1, factor, steps + 1, dtype=torch.float64).tolist()[:-1]
    rising = line if factor > 1 else [factor] * steps
    assert found[:steps] == pytest.approx(rising)
    assert found[steps:] == [factor] * 3


# ---- a curve of rates ----------------------------------------------------------------

EXACT = 1e-12


def warmed(steps: int = 10, scheduler: Any = warmup_cosine, **how: Any) -> list[float]:
    """The rate before each of the steps."""
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    made, found = scheduler(optimizer, **how), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        made.step()
    return found


def test_the_curve_is_the_formula_and_torchs_without_a_warm_up() -> None:
    up = [0.5, 1.0, 1.5, 2.0]
    down = [2 * (0.25 + 0.75 * (1 + math.cos(math.pi * k / 6)) / 2) for k in range(7)]
    found = warmed(12, total_steps=10, warmup=0.4, final=0.25)
    assert found == pytest.approx([*up, *down, 0.5], abs=EXACT)
    theirs = warmed(scheduler=CosineAnnealingLR, T_max=10)
    assert warmed(total_steps=10) == pytest.approx(theirs, abs=EXACT)
    curve = WarmupCosine(10, 2, 0.1)
    assert pickle.loads(pickle.dumps(curve)) == curve


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("total_steps", -1, "must be a whole number from 1 .* received -1. It is the"),
        ("total_steps", math.inf, "must be a whole number .* received inf. It is the"),
        ("warmup", 20, "must lie in 0 to 1, received 20. It is a share of the steps"),
        ("warmup", -1, "must lie in 0 to 1, received -1"),
        ("final", 1.5, "must lie in 0 to 1, received 1.5. It is .* the largest rate"),
    ],
)
def test_what_makes_no_curve_is_refused(name: str, value: float, text: str) -> None:
    with pytest.raises(TrainkitError, match=f"warmup_cosine {name}: {text}"):
        warmed(**{"total_steps": 10, name: value})
