"""The rule "gain" in a Trainer: every curve is its formula x the plain one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers.logger import DummyLogger
from torch.optim import SGD, Adadelta, Adam, Rprop

from tests.core.plan.schedulers import ABSOLUTE, MAKERS, deviation
from tests.lit.rates.scaled import (
    BATCH,
    EXACT,
    REFERENCE,
    Saves,
    Scheduled,
    adamw,
    fit,
    plain,
    times,
)
from trainkit import AccumulationCallback, Uniform
from trainkit.core.noise.estimate import NoiseEstimate
from trainkit.errors import TrainkitError
from trainkit.lit.rates.lr_scaling import LRScaling
from trainkit.lit.schedule.callback import AccumulationSchedule

pytestmark = pytest.mark.filterwarnings(
    "ignore:A `OneCycleLR` scheduler is using:RuntimeWarning",
    "ignore:The epoch parameter in `scheduler.step:UserWarning",
    "ignore:To get the last learning rate computed:UserWarning",
    "ignore:Detected call of `lr_scheduler.step:UserWarning",
    "ignore:accumulate_grad_batches=\\d+. the epoch has only:UserWarning",
    "ignore:You're resuming from a checkpoint that ended before:UserWarning",
    "ignore:checkpoint. it was taken inside a window:UserWarning",
    "ignore:checkpoint. taken inside a window:UserWarning",
    "ignore:the loader starts again:UserWarning",
)
NOISE = 5.0
MEASURED = NoiseEstimate(43.25, 33.0, 60.0, 32.0, 1.0, 50)


def scaling(**how: Any) -> LRScaling:
    return LRScaling(
        "gain", **{"reference_batch": REFERENCE, "noise_scale": NOISE, **how}
    )


def gain(size: int, noise: float = NOISE) -> float:
    """Of a window of so many micro-batches."""
    return (1 + noise / REFERENCE) / (1 + noise / (size * BATCH))


def stages(*callbacks: Any, **how: Any) -> Any:
    """Windows of 1, 4 and 2, from the steps 0, 3 and 6 on."""
    schedule = AccumulationSchedule({0: 1, 3: 4, 6: 2}, unit="step")
    module = Scheduled("OneCycleLR-cos", optimizer=adamw)
    all_of_them = [AccumulationCallback(Uniform()), schedule, *callbacks]
    return fit(module, *all_of_them, window=1, **how)


# ---- the rates -----------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
def test_curve_of_every_scheduler_equals_its_gain_times_the_plain_one(
    name: str,
) -> None:
    """Of two groups; ten steps of windows of two micro-batches."""
    curve = fit(Scheduled(name), scaling()).curve
    assert deviation(curve, times(plain(name, 10), [gain(2)] * 10)) <= EXACT
    assert deviation(curve, times(plain(name, 10), [4.0] * 10)) > 0.1  # linear


@pytest.mark.parametrize("name", [None, *ABSOLUTE[-2:]])
def test_adams_curve_equals_the_root_of_its_gain_times_the_plain_one(name: Any) -> None:
    curve = fit(Scheduled(name, optimizer=adamw), scaling()).curve
    assert deviation(curve, times(plain(name, 10), [gain(2) ** 0.5] * 10)) <= EXACT
    assert deviation(curve, times(plain(name, 10), [gain(2)] * 10)) > 0.1
    assert deviation(curve, times(plain(name, 10), [2.0] * 10)) > 0.1  # sqrt


@pytest.mark.parametrize("make", [SGD, adamw])
def test_gain_is_auto_far_below_the_noise_scale_and_one_far_above(make: Any) -> None:
    auto = fit(
        Scheduled("StepLR", optimizer=make), LRScaling(reference_batch=REFERENCE)
    )
    below = fit(Scheduled("StepLR", optimizer=make), scaling(noise_scale=1e12))
    above = fit(Scheduled("StepLR", optimizer=make), scaling(noise_scale=1e-12))
    assert deviation(below.curve, auto.curve) <= 1e-9
    assert deviation(above.curve, plain("StepLR", 10)) <= 1e-9
    assert deviation(above.curve, auto.curve) > 0.4


def test_curve_over_a_schedule_of_windows_equals_each_gain() -> None:
    """The gain is not a power of k: ratios of k would drift from window to window."""
    curve = stages(scaling()).curve
    sizes = [1] * 3 + [4] * 3 + [2] * 20
    factors = [gain(size) ** 0.5 for size in sizes[: len(curve)]]
    assert len(curve) > 6
    assert deviation(curve, times(plain("OneCycleLR-cos", len(curve)), factors)) < EXACT
    roots = [(size * BATCH / REFERENCE) ** 0.5 for size in sizes[: len(curve)]]
    assert deviation(curve, times(plain("OneCycleLR-cos", len(curve)), roots)) > 0.1


def test_warm_up_rises_to_the_gain() -> None:
    curve = fit(Scheduled(None), scaling(warmup_steps=4)).curve
    factors = [1 + (gain(2) - 1) * min(step / 4, 1) for step in range(10)]
    assert deviation(curve, times(plain(None, 10), factors)) <= EXACT


@pytest.mark.parametrize(
    ("decay", "factor"),
    [("none", 1), ("linear", 4), ("sqrt", 2), ("time-scale", 4 / gain(2) ** 0.5)],
)
def test_only_time_scale_takes_the_gain_for_weight_decay(
    decay: Any, factor: float
) -> None:
    module = Scheduled(None, optimizer=adamw)
    before = module.configure_optimizers().param_groups[0]
    after = fit(module, scaling(weight_decay=decay)).groups[-1]
    expected = factor * before["weight_decay"]
    assert after["weight_decay"] == pytest.approx(expected, rel=EXACT)
    assert {k: after[k] for k in ("betas", "eps")} == {
        k: before[k] for k in ("betas", "eps")
    }


# ---- resumed -------------------------------------------------------------------------


@pytest.mark.parametrize("after", [2, 8, 9, 13, 18])
def test_resumed_over_a_schedule_equals_the_uninterrupted_one(
    tmp_path: Path, after: int
) -> None:
    path = tmp_path / "one.ckpt"
    whole = stages(scaling(), Saves(path, after)).curve
    rest = stages(scaling(), ckpt_path=path).curve
    assert 0 < len(rest) < len(whole)
    assert deviation(rest, whole[-len(rest) :]) <= EXACT


OTHERS: list[dict[str, Any]] = [
    {"noise_scale": 70.0},
    {"reference_batch": 12},
    *({"rule": rule, "noise_scale": None} for rule in ("adam-sde", "half-life")),
]


@pytest.mark.parametrize(
    ("other", "is_before"),
    [(None, True), *((each, now) for each in OTHERS for now in (True, False))],
)
def test_resumed_with_other_scaling_equals_that_scaling(
    tmp_path: Path, other: dict[str, Any] | None, is_before: bool
) -> None:
    """From a run without it, with other numbers or another rule; and back."""

    def made() -> list[Any]:
        if other is None:
            return []
        how: dict[str, Any] = {"reference_batch": REFERENCE, "noise_scale": NOISE}
        how |= {"rule": "gain", "weight_decay": "time-scale", **other}
        return [LRScaling(**how)]

    def gained() -> list[Any]:
        return [scaling(weight_decay="time-scale")]

    first, second = (made, gained) if is_before else (gained, made)
    path = tmp_path / "one.ckpt"
    stages(*first(), Saves(path, 9))
    rest, expected = stages(*second(), ckpt_path=path), stages(*second())
    count = len(rest.curve)
    assert 0 < count < len(expected.curve)
    assert deviation(rest.curve, expected.curve[-count:]) <= EXACT
    for key in ("betas", "eps", "weight_decay"):
        found = rest.groups[-1][key]
        assert found == pytest.approx(expected.groups[-1][key], rel=EXACT), key


# ---- what it says --------------------------------------------------------------------


def test_the_row_and_the_hyperparameters_name_the_noise_scale(capsys: Any) -> None:
    logged: dict[str, Any] = {}

    class Logger(DummyLogger):
        def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
            logged.update(params.get("lr_scaling", {}))

    module = Scheduled(None, (0.001,), optimizer=adamw)
    how: dict[str, Any] = {"logger": Logger(), "log_every_n_steps": 1}
    fit(module, scaling(noise_scale=40, reference_batch=1), **how)
    row = "lr 0.001 -> 0.002313 (gain: sqrt, noise scale 40, reference 1)"
    assert row in capsys.readouterr().out
    assert math.sqrt(41 / (1 + 40 / 6)) == pytest.approx(2.31254, rel=1e-5)
    assert logged["noise_scale"] == 40
    assert logged["optimizer_0/rule"] == "gain: sqrt"
    logged.clear()
    fit(Scheduled(None), LRScaling(reference_batch=1), **how)
    assert "noise_scale" not in logged


# ---- where the number comes from -----------------------------------------------------


def a_run(folder: Path, **facts: Any) -> Path:
    folder.mkdir(exist_ok=True)
    summary = {"noise_scale": {**MEASURED.facts(), **facts}}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_a_folder_in_the_home_of_the_user_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    a_run(tmp_path / "earlier")
    assert scaling(noise_scale="~/earlier").noise_scale == 43.25


@pytest.mark.parametrize("kind", [str, Path])
def test_a_folder_is_read_once_and_named(
    tmp_path: Path, kind: Any, capsys: Any
) -> None:
    folder = a_run(tmp_path / "earlier")
    found = scaling(noise_scale=kind(folder))
    a_run(folder, samples=50.0)
    assert found.noise_scale == 43.25
    curve = fit(Scheduled(None), found).curve
    assert deviation(curve, times(plain(None, 10), [gain(2, 43.25)] * 10)) <= EXACT
    said = f"(gain: linear, noise scale 43.25 from {folder}, reference 1.5)"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({}, "noise_scale: must be a positive number .* received None"),
        *(
            ({"noise_scale": each}, "noise_scale: must be a positive number of samples")
            for each in (0, -1, math.inf, math.nan, True, [40], 1j)
        ),
        ({"noise_scale": "no/where"}, "received 'no/where', and there is no such fold"),
        ({"noise_scale": "40"}, "must be a positive number or the folder of a run, re"),
        ({"noise_scale": 4, "unit": "tokens"}, "unit: must be 'samples' for rule='gai"),
    ],
)
def test_a_wrong_noise_scale_is_refused(how: dict[str, Any], said: str) -> None:
    with pytest.raises(TrainkitError, match=said):
        LRScaling("gain", reference_batch=16, **how)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"samples": None, "high": None}, "it knows at least 33 samples"),
        ({"samples": 0.0, "low": 0.0}, "knows that of 0"),
    ],
)
def test_a_run_that_knows_no_noise_scale_is_refused(
    tmp_path: Path, facts: dict[str, Any], said: str
) -> None:
    with pytest.raises(TrainkitError, match=said):
        scaling(noise_scale=a_run(tmp_path, **facts))


@pytest.mark.parametrize("rule", ["auto", "linear", "adam-sde", "none", math.sqrt])
def test_a_noise_scale_for_another_rule_is_refused(rule: Any) -> None:
    with pytest.raises(TrainkitError, match="noise_scale: belongs to rule='gain', rec"):
        LRScaling(rule, reference_batch=16, noise_scale=40)


@pytest.mark.parametrize("make", [Adadelta, Rprop])
def test_an_optimizer_without_a_known_rule_is_refused(make: Any) -> None:
    with pytest.raises(TrainkitError, match=f"gain': knows .* {make.__name__}"):
        fit(Scheduled(None, optimizer=make), scaling())
    assert fit(Scheduled(None, optimizer=Adam), scaling()).curve
