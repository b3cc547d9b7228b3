"""In a Trainer: every curve is factor x the plain one, whatever the batch does."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    LearningRateMonitor,
)
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.optim import SGD, Adam

from tests.core.plan.schedulers import ABSOLUTE, MAKERS, deviation, tensor_rate
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
    fit,
    linear,
    plain,
    times,
)
from trainkit import AccumulationCallback, AccumulationMixin, PerSample, Uniform
from trainkit.lit.rates.lr_scaling import LRScaling
from trainkit.lit.schedule.callback import AccumulationSchedule

pytestmark = pytest.mark.filterwarnings(
    "ignore:A `OneCycleLR` scheduler is using:RuntimeWarning",
    "ignore:The epoch parameter in `scheduler.step:UserWarning",
    "ignore:To get the last learning rate computed:UserWarning",
    "ignore:Detected call of `lr_scheduler.step:UserWarning",
    "ignore:accumulate_grad_batches=\\d+. the epoch has only:UserWarning",
)


def cube_root(k: float) -> float:
    return k ** (1 / 3)


FACTORS: dict[Any, float] = {
    "linear": 4.0,
    "sqrt": 2.0,
    "none": 1.0,
    cube_root: 4 ** (1 / 3),
    "adam-sde": 2.0,
    "half-life": 1.0,
}


def scaled_curve(
    name: str, rule: Any, first: Any, interval: str, window: int = WINDOW
) -> Any:
    module = Scheduled(name, first, optimizer=adamw, interval=interval)
    scaling = LRScaling(rule, reference_batch=REFERENCE)
    epochs, loader = (2, None) if interval == "step" else (6, data(batches=WINDOW))
    return fit(module, scaling, max_epochs=epochs, loader=loader, window=window).curve


@pytest.mark.parametrize(
    ("name", "interval"),
    [
        *((name, "epoch") for name in dict.fromkeys([*ABSOLUTE, *list(MAKERS)[::3]])),
        # Under another rule, all of them below.
        *((name, "step") for name in ("StepLR", *ABSOLUTE[-2:])),
    ],
)
def test_curve_of_every_scheduler_equals_factor_times_the_plain_one(
    name: str, interval: str
) -> None:
    curve = scaled_curve(name, "linear", FIRST["two"], interval)
    assert len(curve) == (2 * STEPS if interval == "step" else 6)
    expected = times(plain(name, len(curve)), [4.0] * len(curve))
    assert deviation(curve, expected) <= EXACT


RULES = [
    *((name, cube_root) for name in MAKERS),  # a factor that no binary fraction is
    *(("StepLR", rule) for rule in FACTORS),
    *zip(cycle(ABSOLUTE[-2:]), FACTORS),
]
"""The rule gives one number: each goes with a relative scheduler and another, and
each scheduler with one rule. One group or two take turns."""


@pytest.mark.parametrize(
    ("name", "rule", "first"),
    [(*rule, [*FIRST][index % 2]) for index, rule in enumerate(dict.fromkeys(RULES))],
)
def test_curve_under_every_rule_equals_its_factor_times_the_plain_one(
    name: str, rule: Any, first: str
) -> None:
    curve = scaled_curve(name, rule, FIRST[first], "step")
    expected = plain(name, len(curve), FIRST[first])
    expected = times(expected, [FACTORS[rule]] * len(curve))
    assert deviation(curve, expected) <= EXACT


@pytest.mark.parametrize("name", ABSOLUTE[:3])
def test_curve_of_groups_scaled_by_hand_differs(name: str) -> None:
    class ByHand(Scheduled):
        def on_train_start(self) -> None:
            optimizer: Any = self.optimizers()
            for group in optimizer.param_groups:
                group["lr"] *= 4

    found = [row[:2] for row in fit(ByHand(name)).curve]
    expected = [row[:2] for row in times(plain(name, 10), [4.0] * 10)]
    assert deviation(found, expected) > 0.05


@pytest.mark.parametrize("name", [None, "CosineAnnealingLR", "OneCycleLR-cos"])
def test_rate_in_one_tensor_of_two_groups_is_scaled_once(name: str | None) -> None:
    rate = tensor_rate(0.1)
    module = Scheduled(name, (rate, rate), optimizer=adamw)
    held: list[Any] = []

    class Holds(pl.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            held.extend(g["lr"] for g in trainer.optimizers[0].param_groups)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            held.extend(g["lr"] for g in trainer.optimizers[0].param_groups)

    curve = fit(module, linear(), Holds()).curve
    expected = fit(Scheduled(name, (tensor_rate(0.1),) * 2, optimizer=adamw)).curve
    assert deviation(curve, times(expected, [4.0] * 10)) <= EXACT
    assert held[0] is held[2]
    assert held[1] is held[3]


# ---- the window changes --------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
def test_curve_over_a_schedule_equals_each_factor_times_the_plain_one(
    name: str,
) -> None:
    """Windows of 2, from the third step on of 4, in mid-epoch."""
    schedule = AccumulationSchedule({0: 2, 2: 3, 5: 1}, unit="step")
    callbacks = [AccumulationCallback(Uniform()), schedule, linear()]
    module = fit(Scheduled(name), *callbacks, window=1, max_epochs=2)
    # 2 2 3 3 | 1 ...: an epoch ends inside no window here but the first's fourth
    sizes = [2, 2, 3, 3, 3] + [1] * 20
    count = len(module.curve)
    factors = [size * BATCH / REFERENCE for size in sizes[:count]]
    assert deviation(module.curve, times(plain(name, count), factors)) <= EXACT
    assert count > 10


def test_curve_over_lightnings_own_schedule_equals_each_factor() -> None:
    """It changes the number at the start of an epoch, after our callbacks."""
    own = GradientAccumulationScheduler({0: 1, 1: 5})
    module = fit(Scheduled("CosineAnnealingLR"), own, linear(), window=1)
    factors = [2.0] * 10 + [10.0] * 2
    expected = times(plain("CosineAnnealingLR", 12), factors)
    assert deviation(module.curve, expected) <= EXACT


@pytest.mark.parametrize("unit", ["epoch", "step"])
def test_monitor_logs_the_scaled_curve_at_its_steps(unit: str) -> None:
    """At the start of an epoch too, where a schedule has just changed the window."""
    logged: list[tuple[int, float]] = []

    class Logger(DummyLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            logged.extend((step or 0, v) for k, v in metrics.items() if "lr-" in k)

    starts = {0: 2, 1: 5} if unit == "epoch" else {0: 2, 5: 5}
    schedule = AccumulationSchedule(starts, unit=unit)  # type: ignore[arg-type]
    module = fit(
        Scheduled("ExponentialLR", (0.1,)),
        LearningRateMonitor(logging_interval="epoch"),
        linear(),
        schedule,
        AccumulationCallback(Uniform()),
        window=1,
        logger=Logger(),
        log_every_n_steps=1,
    )
    assert [rate for _, rate in logged] == [module.curve[0][0], module.curve[5][0]]
    logged.clear()
    schedule = AccumulationSchedule(starts, unit=unit)  # type: ignore[arg-type]
    module = fit(
        Scheduled("ExponentialLR", (0.1,)),
        LearningRateMonitor(logging_interval="step"),
        linear(),
        schedule,
        AccumulationCallback(Uniform()),
        window=1,
        logger=Logger(),
        log_every_n_steps=1,
    )
    by_step = dict(logged)
    assert [by_step[i] for i in range(7)] == [row[0] for row in module.curve]


# ---- warm-up -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        (None, 1),
        ("CosineAnnealingLR", 4),
        ("OneCycleLR-cos", 4),
        ("OneCycleLR-cos", 100),
        (None, 100),
    ],
)
def test_warmed_up_curve_equals_the_rising_factor_times_the_plain_one(
    name: str | None, steps: int
) -> None:
    curve = fit(Scheduled(name), linear(warmup_steps=steps)).curve
    factors = [min(1 + 3 * step / steps, 4) for step in range(10)]
    assert deviation(curve, times(plain(name, 10), factors)) <= EXACT


def test_warm_up_to_a_smaller_factor_takes_it_at_once() -> None:
    curve = fit(Scheduled(None), linear(warmup_steps=4, reference_batch=24)).curve
    assert deviation(curve, times(plain(None, 10), [0.25] * 10)) <= EXACT


def test_warm_up_over_a_schedule_rises_to_the_factor_in_force() -> None:
    schedule = AccumulationSchedule({0: 2, 2: 4}, unit="step")
    callbacks = [AccumulationCallback(Uniform()), schedule, linear(warmup_steps=4)]
    curve = fit(Scheduled(None), *callbacks, window=1).curve
    factors = [1, 1.75, 1 + 7 * 2 / 4, 1 + 7 * 3 / 4] + [8.0] * (len(curve) - 4)
    assert deviation(curve, times(plain(None, len(curve)), factors)) <= EXACT


# ---- several optimizers, by hand -----------------------------------------------------


class ByHand(AccumulationMixin, pl.LightningModule):
    """Two optimizers and their schedulers, stepped once a window."""

    accumulation = PerSample()

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.nets = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
        self.curve: list[list[float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        schedulers: Any = self.lr_schedulers()
        ends = self.window_ends(batch_idx)
        for net, optimizer in zip(self.nets, optimizers, strict=True):
            loss = net(batch.float()).square().mean()
            self.accumulate(loss, batch, optimizer=optimizer)
        if not ends:
            return
        self.curve.append([o.param_groups[0]["lr"] for o in optimizers])
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            self.finish_window(optimizer)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    def configure_optimizers(self) -> Any:
        first = SGD(self.nets[0].parameters(), lr=0.1)
        second = Adam(self.nets[1].parameters(), lr=0.01)
        makers = MAKERS["CosineAnnealingLR"], MAKERS["OneCycleLR-cos"]
        schedulers = [m(o) for m, o in zip(makers, (first, second), strict=True)]
        return [first, second], schedulers


@pytest.mark.parametrize("warmup", [0, 3])
def test_curves_of_two_optimizers_by_hand_equal_the_plain_ones(warmup: int) -> None:
    """Each by its own rule; Lightning counts the steps of both, a warm-up one's."""
    scaling = LRScaling("auto", reference_batch=REFERENCE, warmup_steps=warmup)
    module = fit(ByHand(), scaling)
    reference = fit(ByHand())
    assert len(module.curve) == 10
    for index, factor in enumerate((4.0, 2.0)):
        rising = [
            1 + (factor - 1) * min(step / max(warmup, 1), 1) if warmup else factor
            for step in range(10)
        ]
        found = [[row[index]] for row in module.curve]
        expected = [[row[index]] for row in reference.curve]
        assert deviation(found, times(expected, rising)) <= EXACT
    assert [scaled.rule.name for scaled in scaling.scaled] == ["linear", "sqrt"]


# ---- what the batch is ---------------------------------------------------------------


def test_k_is_batch_times_accumulation_over_the_reference() -> None:
    for window, batch in ((1, 2), (2, 3), (4, 1)):
        scaling = linear()
        fit(Scheduled(None), scaling, window=window, loader=data(batch))
        assert scaling.k == window * batch / REFERENCE
        assert scaling.effective_batch is not None
        assert scaling.effective_batch.size == window * batch


def test_window_longer_than_the_epoch_counts_as_the_epoch() -> None:
    """EDGE_CASES 4: such an epoch is one short window."""
    scaling = linear()
    fit(Scheduled(None), scaling, window=100)
    assert scaling.k == BATCHES * BATCH / REFERENCE


def test_sum_of_losses_is_scaled_as_their_mean(capsys: Any) -> None:
    """EDGE_CASES 26: the law's gradient is the mean in either case."""
    curves = [
        fit(
            Scheduled("OneCycleLR-cos"),
            AccumulationCallback(PerSample(loss_reduction=reduction)),
            linear(),
        ).curve
        for reduction in ("mean", "sum")
    ]
    assert curves[0] == curves[1]
    assert deviation(curves[0], times(plain("OneCycleLR-cos", 10), [4.0] * 10)) <= EXACT


def test_given_micro_batch_goes_before_the_loaders() -> None:
    scaling = linear(micro_batch=9)
    fit(Scheduled(None), scaling)
    assert scaling.k == 9 * WINDOW / REFERENCE


# ---- the same callback again ---------------------------------------------------------
