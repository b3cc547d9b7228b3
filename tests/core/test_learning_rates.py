"""Whatever scheduler draws it, the rest of a curve is factor x what it was to be."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim import lr_scheduler as lrs

from tests.core.schedulers import (
    ABSOLUTE,
    MAKERS,
    Curve,
    cyclic,
    deviation,
    tensor_rate,
)
from trainkit.core.learning_rates import GroupChange, every_scheduler, multiply_rates

EXACT = 1e-12
STEPS = 24
GROUPS = [(0.1,), (0.05, 0.2)]

pytestmark = pytest.mark.filterwarnings(
    "ignore:The epoch parameter in `scheduler.step:UserWarning",
    "ignore:To get the last learning rate computed:UserWarning",
    "ignore:Detected call of `lr_scheduler.step:UserWarning",
)


def scale(curve: Curve, factor: float) -> None:
    multiply_rates([curve.optimizer], [curve.scheduler], factor)


def times(curve: Sequence[Sequence[float]], factors: Sequence[float]) -> Any:
    pairs = zip(curve, factors, strict=True)
    return [[factor * rate for rate in row] for row, factor in pairs]


@pytest.mark.parametrize(
    ("name", "at", "first"),
    [  # one group and two take turns
        (name, at, GROUPS[(row + column) % 2])
        for row, name in enumerate(MAKERS)
        for column, at in enumerate([0, 1, 7, 13])
    ],
)
def test_scaled_curve_equals_factor_times_the_plain_one(
    name: str, first: Any, at: int
) -> None:
    """From the step on at which it is scaled, in the group and in `get_last_lr()`."""
    curve = Curve(name, first)
    found = curve.go(at)
    scale(curve, 8)
    found += curve.go(STEPS - at)
    expected = times(Curve(name, first).go(STEPS), [1] * at + [8] * (STEPS - at))
    assert deviation(found, expected) <= EXACT


@pytest.mark.parametrize(
    ("name", "at"),
    [
        (name, at)
        for row, name in enumerate(MAKERS)
        for at in (0, *([3, 9, 15], [6, 12, 18])[row % 2])
    ],
)
def test_resumed_scaled_curve_equals_the_uninterrupted_one(name: str, at: int) -> None:
    """A new process makes everything anew at the plain rates and loads the state."""
    first = Curve(name)
    scale(first, 0.3)
    found = first.go(at)
    second = Curve(name)
    second.load(copy.deepcopy(first.state()))
    found += second.go(STEPS - at)
    assert deviation(found, times(Curve(name).go(STEPS), [0.3] * STEPS)) <= EXACT


@pytest.mark.parametrize("name", MAKERS)
def test_factors_that_change_on_the_way_equal_their_product(name: str) -> None:
    curve, found, factors = Curve(name), [], []
    total = 1.0
    for factor in (4, 0.125, 3, 7, 0.5, 2):
        scale(curve, factor)
        total *= factor
        found += curve.go(4)
        factors += [total] * 4
    assert deviation(found, times(Curve(name).go(STEPS), factors)) <= EXACT


@pytest.mark.parametrize("name", ABSOLUTE)
def test_scaling_the_groups_alone_draws_another_curve(name: str) -> None:
    """What people do by hand; the schedulers above hold rates of their own."""
    curve = Curve(name)
    for group in curve.optimizer.param_groups:
        group["lr"] *= 8
    found = [row[:2] for row in curve.go(STEPS)]
    expected = [row[:2] for row in times(Curve(name).go(STEPS), [8] * STEPS)]
    assert deviation(found, expected) > 0.05


@pytest.mark.parametrize("name", MAKERS)
def test_shared_tensor_rate_is_scaled_once_and_stays_the_same_object(name: str) -> None:
    """A compiled optimizer knows the tensor by its address."""
    shared = tensor_rate(0.1)

    def make(rate: Any) -> Curve:
        return Curve(name, (rate, rate), SGD)

    curve = make(shared)
    before = [group["lr"] for group in curve.optimizer.param_groups]
    found = curve.go(5)
    scale(curve, 8)
    after = [group["lr"] for group in curve.optimizer.param_groups]
    assert all(x is y for x, y in zip(before, after, strict=True))
    found += curve.go(STEPS - 5)
    expected = make(tensor_rate(0.1)).go(STEPS)
    factors = [1.0] * 5 + [8.0] * (STEPS - 5)
    assert deviation(found, times(expected, factors)) <= EXACT


def test_tensor_rate_of_an_optimizer_alone_is_scaled_in_place() -> None:
    rate = torch.tensor(0.25)
    groups = [{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    optimizer = AdamW(groups, lr=rate)
    multiply_rates([optimizer], [], 4)
    assert rate.item() == 1.0
    assert all(group["lr"] is rate for group in optimizer.param_groups)


def test_least_rate_of_a_later_group_is_scaled() -> None:
    """One `min_lr` for all groups, also for those that come later."""
    curve = Curve("ReduceLROnPlateau", (0.1,))
    plateau: Any = lrs.ReduceLROnPlateau(curve.optimizer, "min", 0.1, 0, min_lr=0.05)
    multiply_rates([curve.optimizer], [plateau], 8)
    later = {"params": [nn.Parameter(torch.zeros(1))], "lr": 0.8}
    curve.optimizer.add_param_group(later)
    for _ in range(4):
        plateau.step(1.0)
    assert [group["lr"] for group in curve.optimizer.param_groups] == [0.4, 0.4]


def test_every_scheduler_finds_nested_ones_once() -> None:
    nested = Curve("SequentialLR-nested").scheduler
    kinds = [type(each).__name__ for each in every_scheduler([nested, nested])]
    assert sorted(kinds) == [
        "ConstantLR",
        "CosineAnnealingWarmRestarts",
        "ExponentialLR",
        "LinearLR",
        "SequentialLR",
        "SequentialLR",
    ]


def test_rates_under_other_names_are_scaled_where_they_are_named() -> None:
    class Warm(lrs.LRScheduler):
        def __init__(self, optimizer: Any) -> None:
            self.warmup_lr, self.steps = 0.01, [0.02, 0.03]
            super().__init__(optimizer)

        def get_lr(self) -> list[float | torch.Tensor]:
            if self.last_epoch < 3:
                return [self.warmup_lr for _ in self.base_lrs]
            return list(self.base_lrs)

    def curve(also: tuple[str, ...]) -> Any:
        optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
        scheduler = Warm(optimizer)
        multiply_rates([optimizer], [scheduler], 4, also=also)
        found = []
        for _ in range(6):
            found.append(scheduler.get_last_lr())
            optimizer.step()
            scheduler.step()
        return scheduler, found

    scheduler, found = curve(("warmup_lr", "steps", "no_such"))
    assert found == [[0.04]] * 3 + [[2.0]] * 3
    assert scheduler.steps == [0.08, 0.12]
    assert curve(())[1] != found


# ---- the other hyperparameters -------------------------------------------------------


def momenta(optimizer: Any, scheduler: Any, steps: int = 20) -> list[Any]:
    found = []
    for _ in range(steps):
        group = optimizer.param_groups[0]
        found.append(group["betas"][0] if "betas" in group else group["momentum"])
        optimizer.step()
        scheduler.step()
    return found


CYCLING = {
    "CyclicLR": lambda o: cyclic(
        o, "triangular", cycle_momentum=True, base_momentum=0.9, max_momentum=0.97
    ),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.3, 21, base_momentum=0.9),
}


@pytest.mark.parametrize("name", CYCLING)
@pytest.mark.parametrize("at", [0, 6])
def test_cycled_beta1_equals_the_mapped_curve(name: str, at: int) -> None:
    """1 - k (1 - beta) is affine, and so is what lies between two betas."""

    def make() -> tuple[Any, Any]:
        optimizer = Adam([nn.Parameter(torch.zeros(1))], lr=0.1, betas=(0.95, 0.99))
        return optimizer, CYCLING[name](optimizer)

    plain = momenta(*make())
    optimizer, scheduler = make()
    found = momenta(optimizer, scheduler, at)
    change = GroupChange(beta1=lambda beta: 1 - 4 * (1 - beta))
    change.apply([optimizer], [scheduler])
    found += momenta(optimizer, scheduler, 20 - at)
    mapped = plain[:at] + [1 - 4 * (1 - beta) for beta in plain[at:]]
    assert found == pytest.approx(mapped, abs=EXACT)
    assert len({round(beta, 6) for beta in plain}) > 4


@pytest.mark.parametrize("name", CYCLING)
def test_cycled_momentum_of_sgd_stays(name: str) -> None:
    """Linear scaling holds the momentum (Goyal et al. 2017)."""

    def make() -> tuple[Any, Any]:
        optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
        return optimizer, CYCLING[name](optimizer)

    optimizer, scheduler = make()
    multiply_rates([optimizer], [scheduler], 8)
    GroupChange(beta1=lambda beta: 0.0).apply([optimizer], [scheduler])
    assert momenta(optimizer, scheduler) == momenta(*make())


def test_group_change_keeps_what_it_is_not_told_to_change() -> None:
    optimizer = AdamW([nn.Parameter(torch.zeros(1))], lr=0.1, amsgrad=True)
    before = dict(optimizer.param_groups[0])
    GroupChange().apply([optimizer], [])
    assert optimizer.param_groups[0] == before
    GroupChange(weight_decay=lambda value: 3 * value).apply([optimizer], [])
    expected = {**before, "weight_decay": 3 * before["weight_decay"]}
    assert optimizer.param_groups[0] == expected
