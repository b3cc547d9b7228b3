"""An optimizer that a module keeps is scaled once, however often it is fitted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from tests.core.schedulers import deviation
from tests.lit.rates.scaled import (
    EXACT,
    REFERENCE,
    Scheduled,
    adamw,
    fit,
    linear,
    times,
)
from trainkit.lit.rates.lr_scaling import LRScaling


class Keeps(Scheduled):
    """Returns the same optimizer in every fit, with a scheduler made anew.

    Attributes:
        begin: the rates and moments that `configure_optimizers` has found.
    """

    def __init__(self, scheduler: Any = None, optimizer: Any = torch.optim.SGD) -> None:
        super().__init__(None, optimizer=optimizer)
        self.kept: Any = super().configure_optimizers()
        self.scheduler = scheduler
        self.begin: list[Any] = []

    def configure_optimizers(self) -> Any:
        group = self.kept.param_groups[0]
        self.begin.append((group["lr"], group.get("betas"), group.get("weight_decay")))
        if self.scheduler is None:
            return self.kept
        config = {"scheduler": self.scheduler(self.kept), "interval": "step"}
        return {"optimizer": self.kept, "lr_scheduler": config}


def one_cycle(optimizer: Any) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, [0.1, 0.4], 30, cycle_momentum=False)


def step(optimizer: Any) -> Any:
    return lr_scheduler.StepLR(optimizer, 100)


@pytest.mark.parametrize(
    ("scheduler", "is_the_same"),
    [(None, True), (step, False), (one_cycle, True)],
)
def test_kept_optimizer_is_scaled_once_in_each_fit(
    scheduler: Any, is_the_same: bool
) -> None:
    """With a Trainer of its own each time."""
    scaled, unscaled = Keeps(scheduler), Keeps(scheduler)
    scaling = linear()
    for _ in range(2):
        fit(scaled, scaling if is_the_same else linear())
        fit(unscaled)
        expected = unscaled.curve[-1][:2]
        rates = [group["lr"] for group in scaled.kept.param_groups]
        assert deviation([scaled.curve[-1][:2]], times([expected], [4.0])) <= EXACT
        found = [group["lr"] for group in unscaled.kept.param_groups]
        assert deviation([rates], times([found], [4.0])) <= EXACT  # it stands scaled
    rows = [[row[:2] for row in each.curve] for each in (scaled, unscaled)]
    assert len(rows[0]) == 20
    assert deviation(rows[0], times(rows[1], [4.0] * 20)) <= EXACT
    assert scaled.begin == unscaled.begin


@pytest.mark.parametrize("rule", ["adam-sde", "half-life"])
def test_moments_of_a_kept_optimizer_are_scaled_once(rule: Any) -> None:
    module = Keeps(optimizer=adamw)
    for _ in range(2):
        fit(module, LRScaling(rule, reference_batch=REFERENCE, weight_decay="linear"))
    first, last = module.groups[0], module.groups[-1]
    assert last["betas"] == pytest.approx(first["betas"], rel=1e-12)
    assert last["weight_decay"] == pytest.approx(0.04, rel=1e-12)
    assert module.begin[1][1] == pytest.approx((0.99, 0.999), rel=1e-12)
    assert module.begin[1][2] == pytest.approx(0.01, rel=1e-12)


def test_kept_optimizer_goes_by_the_reference_of_each_fit() -> None:
    module = Keeps()
    for reference in (REFERENCE, 6, 24):
        fit(module, linear(reference_batch=reference))
    factors = [4.0] * 10 + [1.0] * 10 + [0.25] * 10
    expected = times([[0.05, 0.2]] * 30, factors)
    assert deviation([row[:2] for row in module.curve], expected) <= EXACT


def test_fit_that_was_cut_short_is_scaled_once_the_next_time() -> None:
    class Fails(Keeps):
        def on_train_epoch_end(self) -> None:
            if len(self.begin) == 1:
                raise KeyError("a user's mistake")

    module = Fails(one_cycle)
    with pytest.raises(KeyError):
        fit(module, linear())
    del module.curve[:]
    fit(module, linear())
    expected = fit(Keeps(one_cycle)).curve
    rows = [[row[:2] for row in curve] for curve in (module.curve, expected)]
    assert deviation(rows[0], times(rows[1], [4.0] * 10)) <= EXACT


def test_optimizer_of_another_module_is_left_as_it_stands() -> None:
    first, second = Keeps(), Keeps()
    fit(first, linear())
    fit(second, linear())
    assert [group["lr"] for group in first.kept.param_groups] == [0.2, 0.8]
