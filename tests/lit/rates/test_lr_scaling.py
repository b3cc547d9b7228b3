"""In a Trainer every curve is factor x the plain one, in a resumed run too."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    LambdaCallback,
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
    TORCH_SAYS,
    WINDOW,
    Scheduled,
    adamw,
    cube_root,
    data,
    deviation,
    fit,
    linear,
    plain,
    times,
)
from tests.zoo.callbacks import Saving, Table
from trainkit import AccumulationCallback, AccumulationSchedule, LRScaling, Uniform

pytestmark = [
    TORCH_SAYS,
    pytest.mark.filterwarnings(
        "ignore:A `OneCycleLR` scheduler is using:RuntimeWarning",
        "ignore:accumulate_grad_batches=\\d+. the epoch has only:UserWarning",
        "ignore:You're resuming from a checkpoint that ended before:UserWarning",
        "ignore:checkpoint. taken inside a window:UserWarning",
        "ignore:checkpoint. it was taken inside a window:UserWarning",
        "ignore:the loader starts again:UserWarning",
        "ignore:Be aware that when using `ckpt_path`:UserWarning",
    ),
]
NOISE = 5.0


def gain(size: int) -> float:
    """Of a window of so many micro-batches."""
    return (1 + NOISE / REFERENCE) / (1 + NOISE / (size * BATCH))


def by_gain(noise_scale: float = NOISE, **how: Any) -> LRScaling:
    options = {"reference_batch": REFERENCE, **how}
    return LRScaling("gain", noise_scale=noise_scale, **options)


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
def test_curve_over_a_schedule_is_factor_times_plain(name: str, rule: str) -> None:
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
    curve = fit(Scheduled("CosineAnnealingLR"), own, linear(), window=1).curve
    expected = times(plain("CosineAnnealingLR", 12), [2.0] * 10 + [10.0] * 2)
    assert deviation(curve, expected) <= EXACT


@pytest.mark.parametrize("unit", ["epoch", "step"])
def test_monitor_logs_the_scaled_curve_at_its_steps(unit: Any) -> None:
    """At the start of an epoch too, where a schedule has just changed the window."""

    def curve_of(interval: Any) -> tuple[list[float], dict[float, float]]:
        table = Table()
        starts = {0: 2, 1: 5} if unit == "epoch" else {0: 2, 5: 5}
        monitor = LearningRateMonitor(logging_interval=interval)
        ours = AccumulationSchedule(starts, unit=unit), AccumulationCallback(Uniform())
        how: dict[str, Any] = {"logger": table, "log_every_n_steps": 1, "window": 1}
        module = Scheduled("ExponentialLR", (0.1,))
        fit(module, monitor, linear(), *ours, **how)
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


# ---- a checkpoint is that of a run without scaling, and a resumed run draws one curve


SCHEDULERS = [
    "CosineAnnealingLR",  # with a closed form
    "OneCycleLR-cos",  # with rates of its own
    "SequentialLR-nested",
    "ExponentialLR",  # goes on from the rate of the group
]


def by_sde(**how: Any) -> LRScaling:
    options = {"reference_batch": REFERENCE, "weight_decay": "linear", **how}
    return LRScaling("adam-sde", **options)


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("CosineAnnealingLR", "on_train_start"),
        ("OneCycleLR-cos", "on_train_epoch_start"),
        ("SequentialLR-nested", "on_train_batch_start"),
        ("ExponentialLR", "on_before_optimizer_step"),
        ("OneCycleLR-cos", "on_train_batch_end"),
        ("CosineAnnealingLR", "on_train_epoch_end"),
        ("ExponentialLR", "on_train_end"),
        ("SequentialLR-nested", "after"),
    ],
)
def test_checkpoint_equals_that_of_a_run_without_scaling(
    tmp_path: Path, name: str, hook: str
) -> None:
    """Whatever moment it is saved at: so a run can resume with other scaling, or none,
    and is never scaled twice."""

    def saved(*callbacks: Any) -> dict[str, Any]:
        path = tmp_path / f"{len(callbacks)}.ckpt"
        hooks = {} if hook == "after" else {hook: lambda t, *_: t.save_checkpoint(path)}
        saves: Any = LambdaCallback(**hooks)
        module = Scheduled(name, optimizer=adamw)
        made = trainer(WINDOW, callbacks=[*callbacks, saves], max_epochs=1)
        made.fit(module, data())
        if hook == "after":
            made.save_checkpoint(path)
        return torch.load(path, weights_only=True)

    scaled, unscaled = saved(by_sde(warmup_steps=3)), saved()
    assert scaled["lr_schedulers"] == unscaled["lr_schedulers"]
    found, expected = (
        [each["param_groups"] for each in state["optimizer_states"]]
        for state in (scaled, unscaled)
    )
    assert found == expected
    assert not torch.equal(  # the control: it trained otherwise
        scaled["state_dict"]["weight.0"], unscaled["state_dict"]["weight.0"]
    ) or hook in ("on_train_start", "on_train_epoch_start", "on_train_batch_start")


SCALINGS: dict[str, Any] = {
    "none": lambda: (),
    "linear": lambda: (linear(),),
    "another reference": lambda: (linear(reference_batch=12),),
    "sde": lambda: (by_sde(),),
    "sde, warmed up": lambda: (by_sde(warmup_steps=3),),
    "half-life": lambda: (LRScaling("half-life", reference_batch=1),),
    "gain": lambda: (by_gain(weight_decay="time-scale"),),
    "another noise": lambda: (by_gain(70.0, weight_decay="time-scale"),),
}


def run(name: str, scaling: str, *callbacks: Any, **how: Any) -> Any:
    """Windows of 1, 4 and 2, from the steps 0, 3 and 6 on; with a warm-up always of 2,
    which Lightning divides."""
    ours, window = [*SCALINGS[scaling](), *callbacks], WINDOW
    if "warm" not in scaling:
        schedule = AccumulationSchedule({0: 1, 3: 4, 6: 2}, unit="step")
        ours, window = [AccumulationCallback(Uniform()), schedule, *ours], 1
    return fit(Scheduled(name, optimizer=adamw), *ours, window=window, **how)


STOPS = (0, 1, 2, 7, 8, 9, 12, 13, 17)
"""Batches after which runs are resumed."""


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: Any) -> Any:
    """Trains without a stop, once, and saves after each batch."""

    @cache
    def trained(name: str, scaling: str) -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp("whole")

        def save(trainer: Any, *args: Any) -> None:
            at = trainer.fit_loop.epoch_loop.total_batch_idx
            if at in STOPS:
                trainer.save_checkpoint(folder / f"{at}.ckpt")

        return run(name, scaling, LambdaCallback(on_train_batch_end=save)), folder

    return trained


@pytest.mark.parametrize(
    ("name", "before", "then", "after"),
    [
        ("OneCycleLR-cos", *each)
        for each in (
            ("linear", "linear", 2),
            ("gain", "gain", 8),
            ("sde", "sde", 13),
            ("gain", "gain", 18),
            ("none", "linear", 9),
            ("linear", "none", 9),
            ("linear", "another reference", 8),
            ("sde", "half-life", 8),
            ("half-life", "gain", 13),
            ("gain", "another noise", 2),
            ("another noise", "sde", 18),
        )
    ]
    # At the edge of a window and inside one, within a warm-up and after it.
    + [
        (name, *["sde, warmed up"] * 2, after)
        for number, name in enumerate(SCHEDULERS)
        for after in ((1, 2, 9, 10) if number < 2 else (3, 14))
    ],
)
def test_resumed_with_any_scaling_equals_a_whole_run_with_it(
    whole_run: Any, name: str, before: str, then: str, after: int
) -> None:
    """What the first rule has done leaves no trace."""
    stop = after - 1
    rest = run(name, then, ckpt_path=whole_run(name, before)[1] / f"{stop}.ckpt")
    whole = whole_run(name, then)[0]
    count = len(rest.curve)
    assert 0 < count
    assert rest.curve == whole.curve[-count:]
    assert rest.groups == whole.groups[-count:]
    if "warm" not in then:
        assert count < len(whole.curve)
    else:
        assert count == len(whole.curve) - after // WINDOW
        factors = [min(1 + step / 3, 2) for step in range(10)]
        assert deviation(whole.curve, times(plain(name, 10), factors)) <= EXACT


def test_run_resumed_twice_with_another_window_has_its_factor(tmp_path: Path) -> None:
    paths = [tmp_path / "one.ckpt", tmp_path / "two.ckpt"]
    name = "OneCycleLR-cos"
    fit(Scheduled(name), linear(), Saving(paths[0], 5))
    fit(Scheduled(name), linear(), Saving(paths[1], 9), ckpt_path=paths[0])
    rest = fit(Scheduled(name), linear(), window=5, ckpt_path=paths[1]).curve
    assert deviation(rest, times(plain(name, 7)[5:], [10.0] * 2)) <= EXACT
