"""What a rule makes of betas, eps and weight decay, optimizer by optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.lit.rates.scaled import REFERENCE, Scheduled, adamw, fit
from trainkit import AccumulationCallback, Uniform
from trainkit.errors import TrainkitError
from trainkit.lit.rates.lr_scaling import LRScaling
from trainkit.lit.rates.scaled_optimizer import ScaledOptimizer
from trainkit.lit.schedule.callback import AccumulationSchedule

K = 4
MADE: dict[str, Callable[..., Any]] = {
    "Adam": lambda ps, **o: torch.optim.Adam(ps, betas=(0.9, 0.99), eps=1e-4, **o),
    "AdamW": lambda ps, **o: adamw(ps, amsgrad=True, **o),
    "NAdam": lambda ps, **o: torch.optim.NAdam(ps, betas=(0.95, 0.99), **o),
    "RAdam": lambda ps, **o: torch.optim.RAdam(ps, betas=(0.95, 0.999), **o),
    "Adamax": lambda ps, **o: torch.optim.Adamax(ps, betas=(0.95, 0.99), **o),
    "RMSprop": lambda ps, **o: torch.optim.RMSprop(ps, alpha=0.97, momentum=0.9, **o),
}


def flat(group: dict[str, Any]) -> dict[str, Any]:
    """Its numbers, with a name for each beta."""
    betas = {f"beta{i}": beta for i, beta in enumerate(group.get("betas", ()), 1)}
    others = {k: v for k, v in group.items() if k not in ("params", "betas")}
    kept = {k: v for k, v in others.items() if v is not None}
    return {**kept, **betas}


def numbers(make: Any, rule: Any, **how: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A group's before training, and as its steps see it."""
    module = Scheduled(None, (0.1,), optimizer=make)
    before = flat(module.configure_optimizers().param_groups[0])
    fit(module, LRScaling(rule, **{"reference_batch": REFERENCE, **how}))
    assert all(group == module.groups[0] for group in module.groups)
    return before, flat(module.groups[0])


@pytest.mark.parametrize("name", MADE)
def test_adam_sde_equals_its_formulas(name: str) -> None:
    """And nothing else changes: NAdam's momentum_decay, RMSprop's momentum."""
    before, after = numbers(MADE[name], "adam-sde")
    expected = {**before, "lr": 0.2, "eps": before["eps"] / 2}
    for key in {"beta1", "beta2", "alpha"} & set(before):
        expected[key] = 1 - K * (1 - before[key])
    assert after == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", MADE)
def test_half_life_equals_its_formula(name: str) -> None:
    before, after = numbers(MADE[name], "half-life")
    expected = dict(before)
    for key in {"beta2", "alpha"} & set(before):
        expected[key] = before[key] ** K
    assert after == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("rule", ["linear", "sqrt", "none", math.sqrt])
def test_rules_of_the_rate_leave_the_rest(rule: Any) -> None:
    before, after = numbers(adamw, rule)
    assert {**after, "lr": None} == {**before, "lr": None}


@pytest.mark.parametrize(
    ("rule", "decay", "factor"),
    [
        ("none", "none", 1.0),
        ("none", "linear", 4.0),
        ("sqrt", "sqrt", 2.0),
        ("sqrt", "time-scale", 2.0),
        ("none", "time-scale", 4.0),
        ("linear", "time-scale", 1.0),
        ("adam-sde", lambda k: 3 * k, 12.0),
    ],
)
def test_weight_decay_equals_its_factor(rule: Any, decay: Any, factor: float) -> None:
    before, after = numbers(adamw, rule, weight_decay=decay)
    expected = factor * before["weight_decay"]
    assert after["weight_decay"] == pytest.approx(expected, rel=1e-12)


def test_weight_decay_of_the_reference_batch_is_that_of_the_callable() -> None:
    """A callable need not be 1 at 1: what it returns is the factor."""
    before, after = numbers(
        adamw, "none", weight_decay=lambda k: 0.5, reference_batch=6
    )
    assert after["weight_decay"] == 0.5 * before["weight_decay"]


@pytest.mark.parametrize("rule", ["adam-sde", "half-life"])
@pytest.mark.parametrize("decay", ["none", "linear", "time-scale"])
def test_going_by_k_then_j_equals_once_by_their_product(rule: Any, decay: Any) -> None:
    def made(*ks: float) -> dict[str, Any]:
        optimizer = adamw([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        scaled = ScaledOptimizer(
            optimizer, [], rule=rule, weight_decay=decay, scheduler_rates=()
        )
        for k in ks:
            scaled.follow(k, step=0, warmup_steps=0)
        return flat(optimizer.param_groups[0])

    assert made(3, 0.5, 12) == pytest.approx(made(12), rel=1e-12)
    assert made(3, 0.5, 1) == pytest.approx(made(), rel=1e-12)
    assert made(3) != pytest.approx(made(), rel=1e-12)


def test_reach_goes_by_what_beta_was_for_the_reference_batch() -> None:
    """Scaled by 4 already, 0.9 stands at 0.6; 8 x 0.1 is still below 1."""
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
    scaled = ScaledOptimizer(
        optimizer, [], rule="adam-sde", weight_decay="none", scheduler_rates=()
    )
    for k in (4.0, 8.0, 9.5):
        scaled.follow(k, step=0, warmup_steps=0)
        assert optimizer.param_groups[0]["betas"][0] == pytest.approx(1 - k * 0.1)
    with pytest.raises(TrainkitError, match="with k = 11 beta = 0.9 becomes -0.1:"):
        scaled.check_reach(11)


@pytest.mark.parametrize("name", ["CyclicLR", "OneCycleLR"])
def test_cycled_beta1_below_the_reach_is_refused(name: str) -> None:
    """At the start it is at its highest; the lowest comes in mid-cycle."""

    class Cycles(Scheduled):
        def configure_optimizers(self) -> Any:
            optimizer: Any = adamw(self.parameters(), lr=0.1)
            how: dict[str, Any] = {"base_momentum": 0.7, "max_momentum": 0.99}
            if name == "CyclicLR":
                made: Any = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.1, 1, **how)
            else:
                made = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1, 30, **how)
            return [optimizer], [{"scheduler": made, "interval": "step"}]

    with pytest.raises(TrainkitError, match="k = 4 beta = 0.7 becomes -0.2:"):
        fit(Cycles(None), LRScaling("adam-sde", reference_batch=REFERENCE))


# ---- refusals ------------------------------------------------------------------------


def test_sde_out_of_reach_is_refused_before_training() -> None:
    module = Scheduled(None, optimizer=torch.optim.Adam)
    with pytest.raises(TrainkitError, match="must stay above 0, and with k = 12 "):
        fit(module, LRScaling("adam-sde", reference_batch=0.5))
    assert module.curve == []


def test_half_life_that_forgets_all_is_refused_before_training() -> None:
    """0.95 ** 16384 is 0, and nothing leads back from there."""
    module = Scheduled(None, optimizer=MADE["Adam"])
    scaling = LRScaling("half-life", reference_batch=1, micro_batch=16384)
    with pytest.raises(TrainkitError, match="k = 32768 beta = 0.99 becomes 9.*e-144:"):
        fit(module, scaling)
    schedule = AccumulationSchedule({0: 1, 100: 16384}, unit="step")
    scaling = LRScaling("half-life", reference_batch=1)
    with pytest.raises(TrainkitError, match="k = 49152 beta = 0.99 becomes 2.*e-215:"):
        fit(module, AccumulationCallback(Uniform()), schedule, scaling, window=1)
    assert module.curve == []


def test_later_stage_out_of_reach_is_refused_before_training() -> None:
    module = Scheduled(None, optimizer=torch.optim.Adam)
    schedule = AccumulationSchedule({0: 1, 100: 6}, unit="step")
    scaling = LRScaling("adam-sde", reference_batch=REFERENCE)
    with pytest.raises(TrainkitError, match="must stay above 0, and with k = 12 "):
        fit(module, AccumulationCallback(Uniform()), schedule, scaling, window=1)
    assert module.curve == []


@pytest.mark.parametrize("rule", ["adam-sde", "half-life"])
@pytest.mark.parametrize("name", ["SGD", "ASGD", "Adagrad", "Adadelta", "Rprop"])
def test_rule_of_moments_is_refused_without_them(rule: Any, name: str) -> None:
    module = Scheduled(None, optimizer=getattr(torch.optim, name))
    with pytest.raises(TrainkitError, match=f"Adam's moments, and {name} has no betas"):
        fit(module, LRScaling(rule, reference_batch=REFERENCE))


@pytest.mark.parametrize(
    ("make", "refused"),
    [
        (lambda ps, **o: torch.optim.Adam(ps, weight_decay=0.1, **o), True),
        (lambda ps, **o: torch.optim.Adamax(ps, weight_decay=0.1, **o), True),
        (lambda ps, **o: torch.optim.NAdam(ps, weight_decay=0.1, **o), True),
        (torch.optim.Adam, False),
        (torch.optim.AdamW, False),
        (lambda ps, **o: torch.optim.SGD(ps, weight_decay=0.1, **o), False),
        (
            lambda ps, **o: torch.optim.RAdam(
                ps, weight_decay=0.1, decoupled_weight_decay=True, **o
            ),
            False,
        ),
    ],
)
def test_time_scale_is_refused_for_coupled_decay(make: Any, refused: bool) -> None:
    scaling = LRScaling("none", reference_batch=REFERENCE, weight_decay="time-scale")
    module = Scheduled(None, optimizer=make)
    if not refused:
        assert len(fit(module, scaling).curve) == 10
        return
    with pytest.raises(TrainkitError, match="adds weight decay to the gradient and"):
        fit(module, scaling)


@pytest.mark.parametrize("value", [0, -1.0, math.nan, "2"])
def test_callable_that_returns_no_factor_is_refused(value: Any) -> None:
    options: Any = ({"rule": lambda k: value}, {"weight_decay": lambda k: value})
    for how in options:
        with pytest.raises(TrainkitError, match="the factor must be a positive number"):
            fit(Scheduled(None), LRScaling(reference_batch=REFERENCE, **how))


def test_optimizer_without_a_known_rule_is_refused() -> None:
    module = Scheduled(None, optimizer=torch.optim.Adadelta)
    with pytest.raises(TrainkitError, match="received Adadelta. Name the rule"):
        fit(module, LRScaling(reference_batch=REFERENCE))
