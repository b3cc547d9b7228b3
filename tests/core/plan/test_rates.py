"""Whatever scheduler draws it, the rest of a curve is factor x what it was to be."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.optim import lr_scheduler as lrs

from tests.core.plan.schedulers import (
    ABSOLUTE,
    MAKERS,
    Curve,
    cyclic,
    deviation,
    tensor_rate,
)
from trainkit import TrainkitError, warmup_cosine
from trainkit.core.plan.rates import Change, WarmupCosine, every_scheduler

EXACT = 1e-12
STEPS = 24

pytestmark = pytest.mark.filterwarnings(
    "ignore:The epoch parameter in `scheduler.step:UserWarning",
    "ignore:To get the last learning rate computed:UserWarning",
    "ignore:Detected call of `lr_scheduler.step:UserWarning",
)


def scale(curve: Curve, factor: float) -> None:
    before = [group["lr"] for group in curve.optimizer.param_groups]
    change = Change(rate=lambda rate: factor * rate)
    change.apply(curve.optimizer, [curve.scheduler])
    for rate, group in zip(before, curve.optimizer.param_groups, strict=True):
        # A compiled optimizer knows a tensor by its address.
        assert not isinstance(rate, Tensor) or group["lr"] is rate


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.zeros(1))


def walked(optimizer: Any, scheduler: Any, steps: int, key: str = "lr") -> list[Any]:
    """A value of the first group before each of the next steps."""
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0][key])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    ("factors", "resumed"),
    [  # the factor from these steps on; the steps before which a new process begins
        *(({at: 8}, ()) for at in (0, 1, 7, 13)),
        ({0: 4, 4: 0.125, 8: 3, 12: 7, 16: 0.5, 20: 2}, ()),
        *(({0: 0.3}, (at, at + 3)) for at in (0, 3, 6, 9, 12, 15)),
    ],
)
def test_scaled_curve_equals_the_plain_one_times_the_product_of_factors(
    name: str, factors: dict[int, float], resumed: tuple[int, ...]
) -> None:
    """In the groups, of which two may share a tensor, and in `get_last_lr()`."""
    for rates in ((0.1,), (0.05, 0.2), (tensor_rate(0.1),) * 2):
        plain, curve = Curve(name, copy.deepcopy(rates)), Curve(name, rates)
        total, found, expected = 1.0, [], []
        for step in range(STEPS):
            if step in resumed:
                curve = curve.resumed()
            if step in factors:
                scale(curve, factors[step])
                total *= factors[step]
            found += curve.go(1)
            expected += [[total * rate for rate in row] for row in plain.go(1)]
        assert deviation(found, expected) <= EXACT


@pytest.mark.parametrize("name", ABSOLUTE)
def test_scaling_the_groups_alone_draws_another_curve(name: str) -> None:
    """What people do by hand; these schedulers hold rates of their own."""
    by_hand = Curve(name)
    for group in by_hand.optimizer.param_groups:
        group["lr"] *= 8
    found = [row[:2] for row in by_hand.go(STEPS)]
    expected = [[8 * rate for rate in row[:2]] for row in Curve(name).go(STEPS)]
    assert deviation(found, expected) > 0.05


def test_least_rate_of_a_later_group_is_scaled() -> None:
    """One `min_lr` for all groups, also for those that come later."""
    curve = Curve("ReduceLROnPlateau", (0.1,))
    curve.scheduler = lrs.ReduceLROnPlateau(curve.optimizer, "min", 0.1, 0, min_lr=0.05)
    scale(curve, 8)
    curve.optimizer.add_param_group({"params": [parameter()], "lr": 0.8})
    for _ in range(4):
        curve.scheduler.step(1.0)
    assert [group["lr"] for group in curve.optimizer.param_groups] == [0.4, 0.4]


def test_every_scheduler_finds_nested_ones_once() -> None:
    nested = Curve("SequentialLR-nested").scheduler
    kinds = [type(each).__name__ for each in every_scheduler([nested, nested])]
    inner = ["ConstantLR", "CosineAnnealingWarmRestarts", "ExponentialLR", "LinearLR"]
    assert sorted(kinds) == [*inner, "SequentialLR", "SequentialLR"]


@pytest.mark.parametrize("also", [("warmup_lr", "steps", "no_such"), ()])
def test_rates_under_other_names_are_scaled_where_they_are_named(
    also: tuple[str, ...],
) -> None:
    class Warm(lrs.LRScheduler):
        def __init__(self, optimizer: Any) -> None:
            self.warmup_lr, self.steps = 0.01, [0.02, 0.03]
            super().__init__(optimizer)

        def get_lr(self) -> list[float | torch.Tensor]:
            warm = [self.warmup_lr for _ in self.base_lrs]
            return [*warm] if self.last_epoch < 3 else [*self.base_lrs]

    optimizer = SGD([parameter()], lr=0.5)
    scheduler = Warm(optimizer)
    Change(rate=lambda rate: 4 * rate).apply(optimizer, [scheduler], also=also)
    found = walked(optimizer, scheduler, 6)
    assert found == [0.04, *[0.04 if also else 0.01] * 2, *[2.0] * 3]
    assert scheduler.steps == ([0.08, 0.12] if also else [0.02, 0.03])


# ---- the other hyperparameters -------------------------------------------------------


CYCLING: list[Any] = [
    lambda o: cyclic(
        o, "triangular", cycle_momentum=True, base_momentum=0.9, max_momentum=0.97
    ),
    lambda o: lrs.OneCycleLR(o, 0.3, 21, base_momentum=0.9),
]


@pytest.mark.parametrize("make", CYCLING)
@pytest.mark.parametrize("kind", [Adam, SGD])
def test_cycled_beta1_equals_the_mapped_curve_and_momentum_of_sgd_stays(
    kind: Any, make: Any
) -> None:
    """1 - k (1 - beta) is affine, and so is what lies between two betas. Linear scaling
    holds the momentum (Goyal et al. 2017)."""
    key = "betas" if kind is Adam else "momentum"
    options: Any = {key: (0.95, 0.99) if kind is Adam else 0.9}

    def mapped(beta: float) -> float:
        return 1 - 4 * (1 - beta)

    def changed_at(at: int) -> list[float]:
        optimizer = kind([parameter()], lr=0.1, **options)
        scheduler = make(optimizer)
        found = walked(optimizer, scheduler, at, key)
        Change(rate=lambda rate: 8 * rate, beta1=mapped).apply(optimizer, [scheduler])
        found += walked(optimizer, scheduler, 20 - at, key)
        return [each[0] if kind is Adam else each for each in found]

    plain = changed_at(20)
    assert len({round(beta, 6) for beta in plain}) > 4
    for at in (0, 6):
        rest = [mapped(beta) if kind is Adam else beta for beta in plain[at:]]
        assert changed_at(at) == pytest.approx(plain[:at] + rest, abs=EXACT)


@pytest.mark.parametrize(
    ("kind", "change", "changed"),
    [
        (AdamW, {}, {}),
        (AdamW, {"weight_decay": lambda value: 3 * value}, {"weight_decay": 0.03}),
        (AdamW, {"eps": lambda eps: 2 * eps}, {"eps": 2e-8}),
        (AdamW, {"beta2": lambda beta: beta**2}, {"betas": (0.9, 0.999**2)}),
        (torch.optim.RMSprop, {"beta2": lambda beta: beta**2}, {"alpha": 0.99**2}),
        (torch.optim.RMSprop, {"beta1": lambda beta: beta**2}, {}),
    ],
)
def test_change_keeps_what_it_is_not_told_to_change(
    kind: Any, change: Any, changed: dict[str, Any]
) -> None:
    optimizer = kind([parameter()], lr=0.1)
    before = dict(optimizer.param_groups[0])
    Change(**change).apply(optimizer, [])
    assert optimizer.param_groups[0] == {**before, **changed}


# ---- a curve that torch lacks --------------------------------------------------------


def warmed(steps: int = 10, scheduler: Any = warmup_cosine, **how: Any) -> list[float]:
    optimizer = SGD([parameter()], lr=2.0)
    return walked(optimizer, scheduler(optimizer, **how), steps)


def test_the_curve_is_the_formula_and_torchs_without_a_warm_up() -> None:
    up = [0.5, 1.0, 1.5, 2.0]
    down = [2 * (0.25 + 0.75 * (1 + math.cos(math.pi * k / 6)) / 2) for k in range(7)]
    found = warmed(12, total_steps=10, warmup=0.4, final=0.25)
    assert found == pytest.approx([*up, *down, 0.5], abs=EXACT)
    theirs = warmed(scheduler=lrs.CosineAnnealingLR, T_max=10)
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
