"""Each formula equals its paper's, and going by k and then by j equals once by k j."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn

from trainkit.core import scaling
from trainkit.core.scaling import (
    RULES,
    WEIGHT_DECAY,
    ScalingRule,
    check_weight_decay,
    checked_factor,
    gain_rule,
    make_rule,
    refuse_sde_overreach,
    rule_for,
    time_scale_weight_decay,
    warmed_up,
)
from trainkit.errors import TrainkitError

KS = (0.25, 1, 2, 3, 8)
FORMULAS = {
    "linear": (lambda value, k: value * scaling.linear_factor(k), 0.1),
    "sqrt": (lambda value, k: value * scaling.sqrt_factor(k), 0.1),
    "sde_beta": (scaling.sde_beta, 0.999),
    "sde_eps": (scaling.sde_eps, 1e-8),
    "half_life_beta": (scaling.half_life_beta, 0.95),
    "ema_decay": (scaling.ema_decay, 0.999),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_formula_by_k_then_j_equals_once_by_their_product(name: str) -> None:
    formula, value = FORMULAS[name]
    for k, j in itertools.product(KS, KS):
        once = formula(value, k * j)
        assert formula(formula(value, k), j) == pytest.approx(once, rel=1e-12), (k, j)
    assert formula(value, 1) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("k", KS)
def test_formulas_equal_the_papers(k: float) -> None:
    assert scaling.linear_factor(k) == k  # Goyal et al. 2017
    assert scaling.sqrt_factor(k) ** 2 == pytest.approx(k)  # Malladi et al. 2022
    assert 1 - scaling.sde_beta(0.99, k) == pytest.approx(k * 0.01)
    assert scaling.sde_eps(1e-8, k) == pytest.approx(1e-8 / k**0.5)


@pytest.mark.parametrize("beta2", [0.9, 0.95, 0.999])
@pytest.mark.parametrize("k", KS)
def test_half_life_in_samples_stays(beta2: float, k: float) -> None:
    """Marek et al. 2025: over how many samples a gradient's share falls to a half."""

    def half_life(beta: float, batch: float) -> float:
        return batch * math.log(0.5) / math.log(beta)

    after = half_life(scaling.half_life_beta(beta2, k), 32 * k)
    assert after == pytest.approx(half_life(beta2, 32))


@pytest.mark.parametrize("k", [2, 3, 8])
def test_average_over_k_equal_weights_equals_one_at_decay_to_the_k(k: int) -> None:
    """Busbridge et al. 2023: k updates towards the same weights are one of rho^k."""
    decay, average, weight = 0.9, 5.0, 2.0
    slow = average
    for _ in range(k):
        slow = decay * slow + (1 - decay) * weight
    fast = scaling.ema_decay(decay, k)
    assert fast * average + (1 - fast) * weight == pytest.approx(slow, rel=1e-12)


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("rule", ["linear", "sqrt", "none"])
def test_time_scale_keeps_the_decay_of_an_epoch(k: float, rule: str) -> None:
    """Wang and Aitchison 2024: lr x decay a step, 1 / k as many steps."""
    lr_factor = RULES[rule].lr(k)
    product = lr_factor * time_scale_weight_decay(k, lr_factor)
    assert product / k == pytest.approx(1.0)


def test_rules_change_what_their_names_say() -> None:
    changes = {
        name: [f for f in ("beta1", "beta2", "eps") if getattr(rule, f) is not None]
        for name, rule in RULES.items()
    }
    assert changes == {
        "linear": [],
        "sqrt": [],
        "none": [],
        "half-life": ["beta2"],
        "adam-sde": ["beta1", "beta2", "eps"],
    }
    factors = {name: rule.lr(4) for name, rule in RULES.items()}
    assert factors == {
        "linear": 4,
        "sqrt": 2,
        "none": 1,
        "half-life": 1,
        "adam-sde": 2,
    }
    assert {name: factor(4) for name, factor in WEIGHT_DECAY.items()} == {
        "linear": 4,
        "sqrt": 2,
        "none": 1,
    }


# ---- making a rule -------------------------------------------------------------------


def test_make_rule_finds_names_and_callables() -> None:
    def cube_root(k: float) -> float:
        return k ** (1 / 3)

    class Own:
        def __call__(self, k: float) -> float:
            return 5.0

    rules = [make_rule(rule) for rule in ("adam-sde", cube_root, Own())]
    assert [rule.name for rule in rules if rule] == ["adam-sde", "cube_root", "Own"]
    assert [rule.lr(8) for rule in rules if rule] == pytest.approx([8**0.5, 2.0, 5.0])
    assert make_rule("auto") is make_rule("gain") is None  # they ask the optimizer


@pytest.mark.parametrize("rule", ["lineal", "", "LINEAR", 2, None])
def test_unknown_rule_is_refused(rule: Any) -> None:
    with pytest.raises(TrainkitError, match=r"LRScaling rule: must be one of \['auto'"):
        make_rule(rule)


@pytest.mark.parametrize("rule", ["auto", "half-life", "", 2, None, True])
def test_unknown_weight_decay_is_refused(rule: Any) -> None:
    with pytest.raises(TrainkitError, match=r"weight_decay: must be one of \['none'"):
        check_weight_decay(rule)


@pytest.mark.parametrize("rule", ["none", "linear", "sqrt", "time-scale", math.sqrt])
def test_known_weight_decay_is_taken(rule: Any) -> None:
    check_weight_decay(rule)


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, None, "2"])
def test_impossible_factor_is_refused(value: Any) -> None:
    with pytest.raises(TrainkitError, match="LRScaling rule own: the factor must be a"):
        checked_factor("rule own", lambda k: value, 3)


def test_possible_factor_is_a_float() -> None:
    assert isinstance(checked_factor("rule own", lambda k: 3, 2), float)


# ---- auto ----------------------------------------------------------------------------

PARAMETERS = [nn.Parameter(torch.zeros(2, 2))]
LINEAR = ["SGD", "ASGD"]
ROOT = ["Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SparseAdam", "RMSprop", "Adagrad"]


@pytest.mark.parametrize("name", LINEAR + ROOT)
def test_auto_knows_the_optimizers_of_torch(name: str) -> None:
    expected = "linear" if name in LINEAR else "sqrt"
    assert rule_for(getattr(torch.optim, name)).name == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("FusedAdam", "sqrt"),
        ("AdamW8bit", "sqrt"),
        ("PagedAdamW", "sqrt"),
        ("DeepSpeedCPUAdam", "sqrt"),
        ("SGD8bit", "linear"),
        ("FusedSGD", "linear"),
    ],
)
def test_auto_knows_optimizers_of_others_by_name(name: str, expected: str) -> None:
    assert rule_for(type(name, (), {})).name == expected


def test_auto_knows_a_subclass_by_its_bases() -> None:
    class Mine(torch.optim.AdamW):
        pass

    assert rule_for(Mine).name == "sqrt"


@pytest.mark.parametrize("name", ["Adadelta", "Adafactor", "Rprop", "LBFGS", "Lion"])
def test_auto_refuses_what_no_rule_is_known_for(name: str) -> None:
    cls = getattr(torch.optim, name, None) or type(name, (), {})
    with pytest.raises(TrainkitError, match=f"knows SGD .* received {name}. Name the"):
        rule_for(cls)


# ---- gain ----------------------------------------------------------------------------


def gained(name: str, noise_scale: float, reference: float = 16.0) -> ScalingRule:
    cls = getattr(torch.optim, name)
    return rule_for(cls, noise_scale=noise_scale, reference_batch=reference)


@pytest.mark.parametrize(("name", "power"), [("SGD", 1), ("AdamW", 0.5)])
@pytest.mark.parametrize("batch", [1, 16, 24, 128, 4096])
def test_gain_equals_its_formula(name: str, power: float, batch: float) -> None:
    """McCandlish et al. 2018: a step goes as far as 1 / (1 + N / B) of an endless's."""
    expected = ((1 + 40 / 16) / (1 + 40 / batch)) ** power
    found = gained(name, 40).lr(batch / 16)
    assert found == pytest.approx(expected, rel=1e-12)
    other = rule_for(getattr(torch.optim, name)).lr(batch / 16)
    assert (found == pytest.approx(other, rel=0.05)) == (batch == 16)


@pytest.mark.parametrize("name", LINEAR + ROOT)
def test_gain_is_the_rule_of_auto_well_below_the_noise_scale(name: str) -> None:
    auto = rule_for(getattr(torch.optim, name))
    rule = gained(name, 1e9)
    assert rule.name == f"gain: {auto.name}"
    for k in KS:
        assert rule.lr(k) == pytest.approx(auto.lr(k), rel=1e-6)
        assert gained(name, 40).lr(k) != pytest.approx(auto.lr(k), rel=0.1) or k == 1


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_gain_is_level_above_the_noise_scale(name: str) -> None:
    auto, rule = rule_for(getattr(torch.optim, name)), gained(name, 1e-6)
    assert rule.lr(1024) == pytest.approx(1, rel=1e-6)
    assert auto.lr(1024) > 30
    high = gained(name, 48)  # (1 + 48 / 16) at most
    assert high.lr(1e12) == pytest.approx(auto.lr(4), rel=1e-9)


def test_gain_by_k_then_j_is_not_gain_by_their_product() -> None:
    """So a rate needs the factor for k itself, in place of a ratio of two k."""
    rule = gained("SGD", 40)
    assert rule.lr(2) * rule.lr(4) > 1.2 * rule.lr(8)
    assert rule.lr(1) == 1.0


def test_gain_refuses_what_auto_refuses_by_its_own_name() -> None:
    with pytest.raises(TrainkitError, match="rule='gain': knows .* received Adadelta"):
        gained("Adadelta", 40)


def test_gain_leaves_all_but_the_rate() -> None:
    rule = gain_rule(RULES["sqrt"], 40, 16)
    assert (rule.beta1, rule.beta2, rule.eps) == (None, None, None)


# ---- what adam-sde cannot follow -----------------------------------------------------


@pytest.mark.parametrize(
    ("beta", "k", "refused"),
    [(0.9, 9.9, False), (0.9, 10.1, True), (0.75, 4, True), (0.999, 999, False)],
)
def test_sde_is_refused_where_a_moment_is_shorter_than_a_step(
    beta: float, k: float, refused: bool
) -> None:
    if not refused:
        refuse_sde_overreach(RULES["adam-sde"], beta, k)
        assert scaling.sde_beta(beta, k) > 0
        return
    assert scaling.sde_beta(beta, k) <= 1e-12
    with pytest.raises(TrainkitError, match=r"k \(1 - beta\) must be below 1, and"):
        refuse_sde_overreach(RULES["adam-sde"], beta, k)


@pytest.mark.parametrize("name", ["linear", "sqrt", "none", "half-life"])
def test_other_rules_reach_everywhere(name: str) -> None:
    refuse_sde_overreach(RULES[name], 0.5, 1e6)
    refuse_sde_overreach(ScalingRule("own", lambda k: k), 0.5, 1e6)


# ---- warm-up -------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.5, 4, 64])
@pytest.mark.parametrize("steps", [0, 1, 5, 100])
def test_warmed_up_factor_is_linear_from_one(factor: float, steps: int) -> None:
    found = [warmed_up(factor, step, steps) for step in range(steps + 3)]
    line = torch.linspace(1, factor, steps + 1, dtype=torch.float64).tolist()
    assert found[: steps + 1] == pytest.approx(line if steps else [factor])
    assert found[steps:] == [factor] * 3


@pytest.mark.parametrize("factor", [0.1, 0.99, 1.0])
def test_factor_below_one_is_taken_at_once(factor: float) -> None:
    assert [warmed_up(factor, step, 10) for step in range(12)] == [factor] * 12
