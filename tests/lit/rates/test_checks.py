"""What LRScaling says before training, what it refuses, and what it logs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner.tuning import Tuner
from torch.optim import SGD

from tests.helpers import trainer
from tests.lit.rates.scaled import (
    EXACT,
    REFERENCE,
    WINDOW,
    Scheduled,
    adamw,
    data,
    deviation,
    fit,
    linear,
)
from tests.zoo.callbacks import Saving, Table
from trainkit import (
    AccumulationCallback,
    AccumulationSchedule,
    LRScaling,
    PerSample,
    Uniform,
)
from trainkit.core.noise.estimate import NoiseEstimate
from trainkit.errors import TrainkitError

pytestmark = pytest.mark.filterwarnings(
    "ignore:To get the last learning rate computed:UserWarning",
    "ignore:You're resuming from a checkpoint that ended before:UserWarning",
)


# ---- the constructor -----------------------------------------------------------------


POSITIVE = "must be a positive"
GAIN: dict[str, Any] = {"rule": "gain", "noise_scale": 4}


IMPOSSIBLE: dict[str, list[dict[str, Any]]] = {
    "rule: must be one of": [{"rule": rule} for rule in ("cubic", None)],
    f"reference_batch: {POSITIVE}": [
        {"reference_batch": each} for each in (0, -2.0, "256", True, math.nan)
    ],
    "unit: must be one of": [{"unit": "words"}],
    f"micro_batch: {POSITIVE} number": [{"micro_batch": 0}],
    "warmup_steps: must be a whole": [{"warmup_steps": n} for n in (-1, 2.5)],
    "weight_decay: must be one of": [{"weight_decay": n} for n in ("cubic", None)],
    f"noise_scale: {POSITIVE} number of s": [
        {**GAIN, "noise_scale": each}
        for each in (0, -1, math.inf, math.nan, True, [40], 1j)
    ],
    f"noise_scale: {POSITIVE} number .* received None": [{"rule": "gain"}],
    "received 'no/where': .* No such file": [{**GAIN, "noise_scale": "no/where"}],
    f"{POSITIVE} number or the folder of a run": [{**GAIN, "noise_scale": "40"}],
    "unit: must be 'samples' for rule='gain": [{**GAIN, "unit": "tokens"}],
    "noise_scale: belongs to rule='gain'": [
        {**GAIN, "rule": rule}
        for rule in ("auto", "linear", "adam-sde", "none", math.sqrt)
    ],
}


@pytest.mark.parametrize(
    ("options", "match"),
    [(options, match) for match, each in IMPOSSIBLE.items() for options in each],
)
def test_impossible_option_is_refused(options: Any, match: str) -> None:
    with pytest.raises(TrainkitError, match=match):
        LRScaling(**{"reference_batch": 8, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [numpy.int64, numpy.float32, int])
def test_number_of_numpy_is_a_number(kind: Any) -> None:
    scaling = LRScaling(lambda k: kind(k), reference_batch=kind(3), micro_batch=kind(6))
    module = fit(Scheduled(None), scaling)
    assert scaling.k == 4.0
    assert deviation([row[:2] for row in module.curve], [[0.2, 0.8]] * 10) <= EXACT


def test_reference_batch_must_be_given_and_k_is_not_known_at_once() -> None:
    """mmpretrain#1763: what batch a rate is meant for is the first thing people ask."""
    with pytest.raises(TypeError, match="reference_batch"):
        LRScaling("linear")  # type: ignore[call-arg]
    with pytest.raises(TrainkitError, match="LRScaling k: the effective batch is not"):
        _ = linear().k


def test_second_one_is_refused() -> None:
    """Rates would be scaled twice."""
    with pytest.raises(TrainkitError, match="LRScaling: there are two of them"):
        fit(Scheduled(None), linear(), LRScaling("none", reference_batch=1))


@pytest.mark.parametrize(
    ("rule", "reference"), [("adam-sde", REFERENCE), ("half-life", REFERENCE / 4096)]
)
def test_stage_out_of_reach_is_refused_when_it_comes(
    rule: Any, reference: float
) -> None:
    module = Scheduled(None, optimizer=torch.optim.Adam)
    schedule = AccumulationSchedule({0: 1, 2: 6}, unit="step")
    scaling = LRScaling(rule, reference_batch=reference)
    with pytest.raises(TrainkitError, match="must stay above 0, and with k = "):
        fit(module, AccumulationCallback(Uniform()), schedule, scaling, window=1)
    assert len(module.curve) == 2


# ---- the noise scale of a run --------------------------------------------------------


def a_run(folder: Path, **facts: Any) -> Path:
    folder.mkdir(exist_ok=True)
    measured = NoiseEstimate(43.25, 33.0, 60.0, 32.0, 1.0, 50)
    summary = {"noise_scale": {**measured.facts(), **facts}}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_a_folder_is_read_once_and_named(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    """Also one in the home of the user."""
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = a_run(tmp_path / "earlier")
    for kind in (lambda _: "~/earlier", str, Path):
        how = {"reference_batch": REFERENCE, "noise_scale": kind(folder)}
        found = LRScaling("gain", **how)
        a_run(folder, samples=50.0)
        assert found.noise_scale == 43.25
        a_run(folder)
    curve = fit(Scheduled(None, (1.0,)), found).curve
    gain = (1 + 43.25 / REFERENCE) / (1 + 43.25 / 6)
    assert deviation(curve, [[gain, gain]] * 10) <= EXACT
    said = f"(gain: linear, noise scale 43.25 from {folder}, reference 1.5)"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"samples": None, "high": None}, r"it knows at least 33\."),
        ({"samples": 0.0, "low": 0.0}, "knows at least 0"),
    ],
)
def test_a_run_that_knows_no_noise_scale_is_refused(
    tmp_path: Path, facts: dict[str, Any], said: str
) -> None:
    folder = a_run(tmp_path, **facts)
    with pytest.raises(TrainkitError, match=said):
        LRScaling("gain", reference_batch=16, noise_scale=folder)


# ---- the table -----------------------------------------------------------------------

SDE: dict[str, Any] = {"weight_decay": "linear", "warmup_steps": 9}


@pytest.mark.parametrize(
    ("make", "rule", "how", "expected"),
    [
        (SGD, "auto", {}, "lr 0.1 -> 0.4 (auto: linear, reference 1.5)"),
        (adamw, "auto", {}, "lr 0.1 -> 0.2 (auto: sqrt, reference 1.5)"),
        (
            *(adamw, "gain", {"noise_scale": 40, "reference_batch": 1}),
            "lr 0.1 -> 0.2313 (gain: sqrt, noise scale 40, reference 1)",
        ),
        (
            *(adamw, "adam-sde", SDE),
            "lr 0.1 -> 0.2, beta1 0.99 -> 0.96, beta2 0.999 -> 0.996, weight_decay "
            "0.01 -> 0.04, eps 0.0001 -> 5e-05 (adam-sde, reference 1.5), over 9 steps",
        ),
    ],
)
@pytest.mark.parametrize("with_windows", [True, False])
def test_table_says_every_value_and_the_step_once(
    make: Any, rule: Any, how: Any, expected: str, with_windows: bool, capsys: Any
) -> None:
    """Also where nobody of trainkit divides windows."""
    scaling = LRScaling(rule, **{"reference_batch": REFERENCE, **how})
    ours = [AccumulationCallback(PerSample())] * with_windows
    fit(Scheduled(None, (0.1,), optimizer=make), scaling, *ours)
    said = capsys.readouterr().out
    assert said.count(f"learning rate: {expected}\n") == 1
    step = "per-device batch 3 x accumulation 2 x ranks 1 = 6 samples a step"
    assert said.count(step) == 1


# ---- hyperparameters -----------------------------------------------------------------


def run(
    scaling: Any, *more: Any, path: Path | None = None, module: Any = None, **how: Any
) -> tuple[list[dict[str, Any]], list[tuple[float, ...]]]:
    """The hyperparameters, and the changes, that are logged."""
    table = Table()
    how |= {"logger": table, "log_every_n_steps": 1}
    module = module or Scheduled("CosineAnnealingLR")
    fit(module, scaling, *more, ckpt_path=path, **how)
    names = "lr_scaling/k", "lr_scaling/effective_batch", "step"
    rows = [row for row in table.rows if names[0] in row]
    return (
        [each["lr_scaling"] for each in table.parameters],
        [tuple(row[name] for name in names) for row in rows],
    )


def test_values_before_and_after_are_logged() -> None:
    scaling = LRScaling("adam-sde", reference_batch=REFERENCE, weight_decay="sqrt")
    module = Scheduled("OneCycleLR-cos", optimizer=adamw)
    ((values,), changes) = run(scaling, module=module)
    assert changes == []
    expected = {
        "group_0/max_lr": (0.15, 0.3),
        "group_1/max_lr": (0.6, 1.2),
        "group_0/beta1": (0.99, 0.96),
        "group_1/beta2": (0.999, 0.996),
        "group_0/eps": (1e-4, 5e-5),
        "group_0/weight_decay": (0.01, 0.02),
    }
    for name, (before, after) in expected.items():
        key = f"optimizer_0/{name}"
        assert values[f"{key}/before"] == pytest.approx(before)
        assert values[f"{key}/after"] == pytest.approx(after)
    batch = {"reference_batch": 1.5, "effective_batch": 6, "unit": "samples", "k": 4.0}
    assert values.items() >= {**batch, "optimizer_0/rule": "adam-sde"}.items()
    assert "noise_scale" not in values
    how: dict[str, Any] = {"reference_batch": 1.5, "noise_scale": 40}
    ((values,), _) = run(LRScaling("gain", **how))
    assert (values["noise_scale"], values["optimizer_0/rule"]) == (40, "gain: linear")


def test_hyperparameters_are_logged_once_and_later_changes_as_metrics() -> None:
    """MLflow, for one, refuses another value of a parameter."""
    schedule = AccumulationSchedule({0: 1, 4: 2, 7: 5}, unit="step")
    ours = [AccumulationCallback(Uniform()), schedule]
    ((values,), changes) = run(linear(), *ours, window=1)
    assert values["k"] == 2.0
    assert changes == [(4.0, 6.0, 4), (10.0, 15.0, 7)]


@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_resumed_run_logs_the_same_hyperparameters(
    tmp_path: Path, warmup_steps: int
) -> None:
    """As every run does that goes on in the logger of the first: no other value."""
    path, unscaled = tmp_path / "one.ckpt", tmp_path / "unscaled.ckpt"
    how: dict[str, Any] = {"warmup_steps": warmup_steps}
    first = run(linear(**how), Saving(path, 3))
    assert first[1] == []
    fit(Scheduled("CosineAnnealingLR"), Saving(unscaled, 3))
    for each in path, unscaled:
        assert run(linear(**how), path=each) == first


# ---- Lightning's finders -------------------------------------------------------------


class Finds(Scheduled):
    lr = 0.1
    batch_size = 3

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> Any:
        return data(self.batch_size, 60 // self.batch_size)


def finder(tmp_path: Path, *callbacks: Any) -> Any:
    how: dict[str, Any] = {"max_epochs": 3, "default_root_dir": str(tmp_path)}
    return trainer(WINDOW, callbacks=list(callbacks), **how)


QUIET = pytest.mark.filterwarnings(
    "ignore:.*accumulate_grad_batches:UserWarning",
    "ignore:.*weights_only:UserWarning",
    "ignore:.*srun:UserWarning",
    "ignore:BatchSizeFinder:UserWarning",
)


@QUIET
def test_what_the_tuner_finds_is_scaled_once(tmp_path: Path) -> None:
    scaling, module = linear(), Finds(None)
    made = finder(tmp_path, scaling)
    found: Any = Tuner(made).lr_find(
        module, num_training=20, early_stop_threshold=None, update_attr=True
    )
    assert module.curve[0][0] == pytest.approx(1e-8)  # the search is not scaled
    assert found.suggestion() == module.lr != 0.1
    Tuner(made).scale_batch_size(module, max_trials=1, steps_per_trial=1)
    assert module.batch_size == 2
    module.curve.clear()
    made.fit(module)
    k = 2 * WINDOW / REFERENCE
    assert deviation([row[:1] for row in module.curve], [[k * module.lr]] * 45) <= EXACT
    assert [scaled.factor for scaled in scaling.scaled] == [k]


@QUIET
def test_rate_that_the_callback_finds_is_scaled_once(tmp_path: Path) -> None:
    path, module, rest = tmp_path / "one.ckpt", Finds(None), Finds(None)
    search = LearningRateFinder(num_training_steps=20, early_stop_threshold=None)
    finder(tmp_path, linear(), search, Saving(path, 3)).fit(module)
    trained = [row[:1] for row in module.curve[20:]]
    assert deviation(trained, [[4 * module.lr]] * 30) <= EXACT
    finder(tmp_path, linear()).fit(rest, ckpt_path=path, weights_only=True)
    assert deviation([row[:1] for row in rest.curve], trained[2:]) <= EXACT
