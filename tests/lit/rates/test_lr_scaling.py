"""In a Trainer: every curve is factor x the plain one, whatever the batch does."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    LearningRateMonitor,
)
from torch.optim import SGD

from tests.helpers import trainer
from tests.lit.rates.scaled import (
    BATCH,
    BATCHES,
    EXACT,
    FIRST,
    REFERENCE,
    STEPS,
    WINDOW,
    Scheduled,
    adamw,
    data,
    deviation,
    fit,
    linear,
    plain,
    times,
)
from tests.zoo.callbacks import Table
from trainkit import AccumulationCallback, AccumulationSchedule, LRScaling, Uniform

pytestmark = pytest.mark.filterwarnings(
    "ignore:A `OneCycleLR` scheduler is using:RuntimeWarning",
    "ignore:The epoch parameter in `scheduler.step:UserWarning",
    "ignore:To get the last learning rate computed:UserWarning",
    "ignore:Detected call of `lr_scheduler.step:UserWarning",
    "ignore:accumulate_grad_batches=\\d+. the epoch has only:UserWarning",
)
NOISE = 5.0


def cube_root(k: float) -> float:
    return k ** (1 / 3)


def gain(size: int) -> float:
    """Of a window of so many micro-batches."""
    return (1 + NOISE / REFERENCE) / (1 + NOISE / (size * BATCH))


def by_gain(**how: Any) -> LRScaling:
    options = {"reference_batch": REFERENCE, "noise_scale": NOISE, **how}
    return LRScaling("gain", **options)


# ---- each rule, with schedulers of each kind -----------------------------------------


@pytest.mark.parametrize(
    ("name", "rule", "factor", "interval", "make"),
    [
        ("StepLR", "linear", 4.0, "step", SGD),
        ("CosineAnnealingLR", "linear", 4.0, "epoch", SGD),
        ("OneCycleLR-cos", "sqrt", 2.0, "step", adamw),
        ("ReduceLROnPlateau", cube_root, 4 ** (1 / 3), "step", SGD),
        ("ReduceLROnPlateau", "linear", 4.0, "epoch", SGD),
        ("SequentialLR-nested", "adam-sde", 2.0, "step", adamw),
        ("ChainedScheduler", "half-life", 1.0, "epoch", adamw),
        ("LambdaLR", "none", 1.0, "step", SGD),
        ("ExponentialLR", "auto", 4.0, "step", SGD),
        ("CyclicLR-triangular2", "auto", 2.0, "step", adamw),
        ("OneCycleLR-linear", "gain", gain(2), "step", SGD),
        (None, "gain", gain(2) ** 0.5, "step", adamw),
    ],
)
@pytest.mark.parametrize("first", FIRST)
def test_curve_under_every_rule_equals_its_factor_times_the_plain_one(
    name: Any, rule: Any, factor: float, interval: str, make: Any, first: str
) -> None:
    module = Scheduled(name, FIRST[first], optimizer=make, interval=interval)
    noise_scale = NOISE if rule == "gain" else None
    scaling = LRScaling(rule, reference_batch=REFERENCE, noise_scale=noise_scale)
    epochs, loader = (2, None) if interval == "step" else (6, data(batches=WINDOW))
    curve = fit(module, scaling, max_epochs=epochs, loader=loader).curve
    assert len(curve) == (2 * STEPS if interval == "step" else 6)
    expected = times(plain(name, len(curve), FIRST[first]), [factor] * len(curve))
    assert deviation(curve, expected) <= EXACT


# ---- the window changes --------------------------------------------------------------


@pytest.mark.parametrize("rule", ["linear", "gain"])
@pytest.mark.parametrize("name", ["CosineAnnealingLR", "SequentialLR"])
def test_curve_over_a_schedule_equals_each_factor_times_the_plain_one(
    name: str, rule: str
) -> None:
    """Windows of 2, from the third step on of 3, in mid-epoch."""
    schedule = AccumulationSchedule({0: 2, 2: 3, 5: 1}, unit="step")
    scaling = linear() if rule == "linear" else by_gain()
    callbacks = [AccumulationCallback(Uniform()), schedule, scaling]
    curve = fit(Scheduled(name), *callbacks, window=1, max_epochs=2).curve
    sizes = ([2, 2, 3, 3, 3] + [1] * 20)[: len(curve)]
    ks = [size * BATCH / REFERENCE for size in sizes]
    factors = ks if rule == "linear" else [gain(size) for size in sizes]
    assert deviation(curve, times(plain(name, len(curve)), factors)) <= EXACT
    assert len(curve) > 10


def test_curve_over_lightnings_own_schedule_equals_each_factor() -> None:
    """It changes the number at the start of an epoch, after our callbacks."""
    own = GradientAccumulationScheduler({0: 1, 1: 5})
    module = fit(Scheduled("CosineAnnealingLR"), own, linear(), window=1)
    factors = [2.0] * 10 + [10.0] * 2
    expected = times(plain("CosineAnnealingLR", 12), factors)
    assert deviation(module.curve, expected) <= EXACT


@pytest.mark.parametrize("unit", ["epoch", "step"])
def test_monitor_logs_the_scaled_curve_at_its_steps(unit: Any) -> None:
    """At the start of an epoch too, where a schedule has just changed the window."""

    def curve_of(interval: Any) -> tuple[list[float], dict[float, float]]:
        table = Table()
        starts = {0: 2, 1: 5} if unit == "epoch" else {0: 2, 5: 5}
        callbacks = [
            LearningRateMonitor(logging_interval=interval),
            linear(),
            AccumulationSchedule(starts, unit=unit),
            AccumulationCallback(Uniform()),
        ]
        how: dict[str, Any] = {"logger": table, "log_every_n_steps": 1}
        module = fit(Scheduled("ExponentialLR", (0.1,)), *callbacks, window=1, **how)
        rows = [row for row in table.rows if "lr-SGD" in row]
        by_step = {row["step"]: row["lr-SGD"] for row in rows}
        return [row[0] for row in module.curve], by_step

    curve, by_step = curve_of("epoch")
    assert [*by_step.values()] == [curve[0], curve[5]]
    curve, by_step = curve_of("step")
    assert [by_step[i] for i in range(7)] == curve


# ---- warm-up -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "steps", "scaling", "factor"),
    [
        (None, 1, linear, 4.0),
        ("OneCycleLR-cos", 4, linear, 4.0),
        (None, 100, linear, 4.0),
        (None, 4, by_gain, gain(2)),
        # A smaller factor is taken at once.
        (None, 4, partial(linear, reference_batch=24), 0.25),
    ],
)
def test_warmed_up_curve_equals_the_rising_factor_times_the_plain_one(
    name: str | None, steps: int, scaling: Any, factor: float
) -> None:
    curve = fit(Scheduled(name), scaling(warmup_steps=steps)).curve
    rising = [min(1 + (factor - 1) * step / steps, factor) for step in range(10)]
    factors = rising if factor > 1 else [factor] * 10
    assert deviation(curve, times(plain(name, 10), factors)) <= EXACT


def test_warm_up_over_a_schedule_rises_to_the_factor_in_force() -> None:
    schedule = AccumulationSchedule({0: 2, 2: 4}, unit="step")
    callbacks = [AccumulationCallback(Uniform()), schedule, linear(warmup_steps=4)]
    curve = fit(Scheduled(None), *callbacks, window=1).curve
    factors = [1, 1.75, 1 + 7 * 2 / 4, 1 + 7 * 3 / 4] + [8.0] * (len(curve) - 4)
    assert deviation(curve, times(plain(None, len(curve)), factors)) <= EXACT


# ---- what the batch is ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "batch", "how", "size"),
    [
        (1, 2, {}, 2),
        (4, 1, {}, 4),
        (WINDOW, BATCH, {"micro_batch": 9}, 9 * WINDOW),  # it goes before the loader's
        (100, BATCH, {}, BATCHES * BATCH),  # such an epoch is one short window
    ],
)
def test_k_is_batch_times_accumulation_over_the_reference(
    window: int, batch: int, how: dict[str, Any], size: int
) -> None:
    scaling = linear(**how)
    fit(Scheduled(None), scaling, window=window, loader=data(batch))
    assert scaling.k == size / REFERENCE
    assert scaling.effective_batch is not None
    assert scaling.effective_batch.size == size


# ---- the same again ------------------------------------------------------------------


class Keeps(Scheduled):
    """Returns the same optimizer for each `fit`, under a new scheduler."""

    kept: Any = None

    def configure_optimizers(self) -> Any:
        self.kept = self.kept or super().configure_optimizers()["optimizer"]
        scheduler = torch.optim.lr_scheduler.ExponentialLR(self.kept, 1.0)
        return [self.kept], [scheduler]


@pytest.mark.parametrize("ends", ["well", "by an exception"])
@pytest.mark.parametrize("again", ["same callback", "another callback"])
def test_second_fit_is_scaled_once(ends: str, again: str) -> None:
    """The rates of the first are still there for those who look at its end."""

    class Ends(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if ends != "well":
                raise KeyError("a user's mistake")

    module, scaling = Keeps("ExponentialLR"), linear()
    if ends == "well":
        fit(module, scaling, Ends())
    else:
        with pytest.raises(KeyError):
            fit(module, scaling, Ends())
    assert module.kept.param_groups[0]["lr"] == pytest.approx(0.2)
    fit(module, scaling if again == "same callback" else linear())
    assert {round(row[0], 12) for row in module.curve} == {0.2}


def test_development_run_is_scaled_and_validation_alone_is_not() -> None:
    class Validates(Scheduled):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

    module = fit(Scheduled(None), linear(), fast_dev_run=True)
    assert deviation(module.curve, times(plain(None, 1), [2.0])) <= EXACT
    scaling = linear()
    trainer(callbacks=[scaling]).validate(Validates(None), data())
    assert scaling.effective_batch is None
    assert scaling.state_dict() == {}
    scaling.load_state_dict({"k": 2.0})
    assert scaling.state_dict() == {"k": 2.0}  # a finder saves it before training
