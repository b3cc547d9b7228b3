"""What LRScaling says before training, what it refuses, and what it logs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.tuner.tuning import Tuner
from torch import Tensor, nn

from tests.helpers import trainer
from tests.lit.rates.scaled import (
    EXACT,
    REFERENCE,
    WINDOW,
    Saves,
    Scheduled,
    adamw,
    data,
    fit,
    linear,
    plain,
    times,
)
from tests.lit.rates.schedulers import deviation
from trainkit import AccumulationCallback, AccumulationMixin, PerSample, Uniform
from trainkit.core.noise.estimate import NoiseEstimate
from trainkit.errors import TrainkitError
from trainkit.lit.rates.lr_scaling import LRScaling
from trainkit.lit.schedule.callback import AccumulationSchedule

pytestmark = pytest.mark.filterwarnings(
    "ignore:To get the last learning rate computed:UserWarning",
    "ignore:You're resuming from a checkpoint that ended before:UserWarning",
)


# ---- the constructor -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"rule": "cubic"}, "LRScaling rule: must be one of"),
        ({"rule": None}, "LRScaling rule: must be one of"),
        ({"reference_batch": 0}, "LRScaling reference_batch: must be a positive"),
        ({"reference_batch": -2.0}, "LRScaling reference_batch: must be a positive"),
        ({"reference_batch": "256"}, "LRScaling reference_batch: must be a positive"),
        ({"reference_batch": True}, "LRScaling reference_batch: must be a positive"),
        ({"reference_batch": float("nan")}, "reference_batch: must be a positive"),
        ({"unit": "words"}, "LRScaling unit: must be one of"),
        ({"micro_batch": 0}, "LRScaling micro_batch: must be a positive number"),
        ({"warmup_steps": -1}, "LRScaling warmup_steps: must be a whole number"),
        ({"warmup_steps": 2.5}, "LRScaling warmup_steps: must be a whole number"),
        ({"weight_decay": "cubic"}, "LRScaling weight_decay: must be one of"),
        ({"weight_decay": None}, "LRScaling weight_decay: must be one of"),
    ],
)
def test_impossible_option_is_refused(options: Any, match: str) -> None:
    with pytest.raises(TrainkitError, match=match):
        LRScaling(**{"reference_batch": 8, **options})  # type: ignore[arg-type]


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
        *(
            ({"noise_scale": 4, "rule": rule}, "noise_scale: belongs to rule='gain', r")
            for rule in ("auto", "linear", "adam-sde", "none", math.sqrt)
        ),
    ],
)
def test_a_wrong_noise_scale_is_refused(how: dict[str, Any], said: str) -> None:
    with pytest.raises(TrainkitError, match=said):
        LRScaling(**{"rule": "gain", "reference_batch": 16, **how})


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
    class Other(LRScaling):
        @property
        def state_key(self) -> str:
            return "other"

    second = Other("none", reference_batch=1)
    with pytest.raises(TrainkitError, match="scaled once, and 2 of them are among"):
        fit(Scheduled(None), linear(), second)


@pytest.mark.parametrize("rule", ["adam-sde", "half-life"])
def test_later_stage_out_of_reach_is_refused_before_training(rule: Any) -> None:
    module = Scheduled(None, optimizer=torch.optim.Adam)
    size = 6 if rule == "adam-sde" else 16384
    schedule = AccumulationSchedule({0: 1, 100: size}, unit="step")
    scaling = LRScaling(rule, reference_batch=REFERENCE)
    with pytest.raises(TrainkitError, match="must stay above 0, and with k = "):
        fit(module, AccumulationCallback(Uniform()), schedule, scaling, window=1)
    assert module.curve == []


# ---- the noise scale of a run --------------------------------------------------------


def a_run(folder: Path, **facts: Any) -> Path:
    folder.mkdir(exist_ok=True)
    measured = NoiseEstimate(43.25, 33.0, 60.0, 32.0, 1.0, 50)
    summary = {"noise_scale": {**measured.facts(), **facts}}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_a_folder_is_read_once_and_named(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
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
        ({"samples": None, "high": None}, "it knows at least 33 samples"),
        ({"samples": 0.0, "low": 0.0}, "knows that of 0"),
    ],
)
def test_a_run_that_knows_no_noise_scale_is_refused(
    tmp_path: Path, facts: dict[str, Any], said: str
) -> None:
    folder = a_run(tmp_path, **facts)
    with pytest.raises(TrainkitError, match=said):
        LRScaling("gain", reference_batch=16, noise_scale=folder)


# ---- the table -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (torch.optim.SGD, "lr 0.1 -> 0.4 (auto: linear, reference 1.5)"),
        (adamw, "lr 0.1 -> 0.2 (auto: sqrt, reference 1.5)"),
    ],
)
def test_plan_says_which_rule_auto_has_chosen(
    make: Any, expected: str, capsys: Any
) -> None:
    scaling = LRScaling(reference_batch=REFERENCE)
    fit(Scheduled(None, (0.1,), optimizer=make), scaling)
    assert f"learning rate: {expected}" in capsys.readouterr().out


def test_plan_says_every_value(capsys: Any) -> None:
    scaling = LRScaling(
        "adam-sde", reference_batch=REFERENCE, weight_decay="linear", warmup_steps=9
    )
    fit(Scheduled(None, (0.1,), optimizer=adamw), scaling)
    expected = (
        "lr 0.1 -> 0.2, beta1 0.99 -> 0.96, beta2 0.999 -> 0.996, weight_decay 0.01 -> "
        "0.04, eps 0.0001 -> 5e-05 (adam-sde, reference 1.5), over 9 steps"
    )
    assert expected in capsys.readouterr().out


def test_plan_is_shown_once(capsys: Any) -> None:
    fit(Scheduled(None), AccumulationCallback(Uniform()), linear())
    lines = capsys.readouterr().out.splitlines()
    assert sum("learning rate" in line for line in lines) == 1


# ---- hyperparameters -----------------------------------------------------------------


def test_values_before_and_after_are_logged(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    scaling = LRScaling("adam-sde", reference_batch=REFERENCE, weight_decay="sqrt")
    fit(
        Scheduled("OneCycleLR-cos", optimizer=adamw),
        scaling,
        logger=logger,
        log_every_n_steps=1,
    )
    text = Path(logger.log_dir, "hparams.yaml").read_text()
    values = yaml.safe_load(text)["lr_scaling"]
    assert values["reference_batch"] == REFERENCE
    assert values["effective_batch"] == 6
    assert values["unit"] == "samples"
    assert values["k"] == 4.0
    assert values["optimizer_0/rule"] == "adam-sde"
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


class Logger(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.parameters: list[dict[str, Any]] = []
        self.changes: list[tuple[float, float, int | None]] = []

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.parameters.append(params["lr_scaling"])

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if "lr_scaling/k" in metrics:
            size = metrics["lr_scaling/effective_batch"]
            self.changes.append((metrics["lr_scaling/k"], size, step))


def run(scaling: Any, *more: Any, path: Path | None = None, **how: Any) -> Logger:
    logger = Logger()
    how |= {"logger": logger, "log_every_n_steps": 1}
    fit(Scheduled("CosineAnnealingLR"), scaling, *more, ckpt_path=path, **how)
    return logger


@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_resumed_run_with_the_same_k_logs_the_same_hyperparameters(
    tmp_path: Path, warmup_steps: int
) -> None:
    """As every run does that goes on in the logger of the first: no other value."""
    path = tmp_path / "one.ckpt"
    first = run(linear(warmup_steps=warmup_steps), Saves(path, 4))
    second = run(linear(warmup_steps=warmup_steps), path=path)
    (expected,), (found,) = first.parameters, second.parameters
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        is_text = isinstance(value, str)
        assert found[name] == (value if is_text else pytest.approx(value, rel=1e-12))
    assert first.changes == second.changes == []


def test_resumed_run_with_another_k_logs_a_metric_only(tmp_path: Path) -> None:
    """Under Lightning's own step, which it counts after the hook that saved."""
    path = tmp_path / "one.ckpt"
    run(linear(), Saves(path, 4))
    second = run(linear(reference_batch=12), path=path)
    assert second.parameters == []
    assert second.changes == [(0.5, 6.0, 1)]


def test_resumed_run_of_an_unscaled_one_logs_its_hyperparameters(
    tmp_path: Path,
) -> None:
    path = tmp_path / "one.ckpt"
    fit(Scheduled("CosineAnnealingLR"), Saves(path, 4))
    second = run(linear(), path=path)
    assert [each["k"] for each in second.parameters] == [4.0]
    assert second.changes == []


def test_hyperparameters_are_logged_once_and_later_changes_as_metrics() -> None:
    """MLflow, for one, refuses another value of a parameter."""
    schedule = AccumulationSchedule({0: 1, 4: 2, 7: 5}, unit="step")
    logger = run(linear(), AccumulationCallback(Uniform()), schedule, window=1)
    assert [each["k"] for each in logger.parameters] == [2.0]
    assert logger.changes == [(4.0, 6.0, 4), (10.0, 15.0, 7)]


# ---- windows of one's own size -------------------------------------------------------


class OwnSizes(AccumulationMixin, pl.LightningModule):
    """Two optimizers by hand, whose windows have sizes of their own."""

    accumulation = PerSample()

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.sizes = sizes
        self.nets = nn.ModuleList(nn.Linear(1, 1) for _ in sizes)
        self.curve: list[list[float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        made = zip(self.nets, optimizers, self.sizes, strict=True)
        for net, optimizer, size in made:
            loss = net(batch.float()).square().mean()
            self.accumulate(loss, batch, optimizer=optimizer)
            if self.window_ends(batch_idx, every=size):
                self.curve.append([optimizer.param_groups[0]["lr"]])
                self.finish_window(optimizer)
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.05) for net in self.nets], []


@pytest.mark.filterwarnings("ignore:accumulation. an open window:UserWarning")
def test_windows_of_several_sizes_are_refused() -> None:
    """By Lightning's count a step; k would be that of one of them."""
    with pytest.raises(TrainkitError, match=r"windows have \[2, 6\] micro-batches"):
        fit(OwnSizes(2, 6), linear(), window=1)
    module = fit(OwnSizes(2, 6), window=1)
    assert len(module.curve) == 2 * (5 + 2)


@pytest.mark.parametrize("sizes", [(6,), (6, 6)])
def test_table_of_windows_of_their_own_size_is_shown_again_once(
    sizes: tuple[int, ...], capsys: Any
) -> None:
    module = fit(OwnSizes(*sizes), linear(reference_batch=3), window=1)
    first, again = _after(capsys.readouterr().out, "step: ")
    assert first.startswith("per-device batch 3 x accumulation 1 x ranks 1 = 3 ")
    assert again == "per-device batch 3 x accumulation 6 x ranks 1 = 18 samples a step"
    expected = plain(None, 4 * len(sizes), (0.05,))
    expected = [row[:1] for row in times(expected, [6.0] * len(expected))]
    assert deviation(module.curve, expected) <= EXACT


def test_table_of_its_own_size_says_the_new_rates(capsys: Any) -> None:
    fit(OwnSizes(6), linear(reference_batch=3), window=1)
    rates = _after(capsys.readouterr().out, "learning rate: ")
    assert rates[1] == "lr 0.05 -> 0.3 (linear, reference 3)"
    assert len(rates) == 2


def test_table_of_the_trainers_size_is_shown_once(capsys: Any) -> None:
    fit(OwnSizes(2, 2), linear(), window=2)
    assert len(_after(capsys.readouterr().out, "step: ")) == 1


def test_table_of_a_schedule_is_shown_once(capsys: Any) -> None:
    """It says the sizes beforehand."""
    schedule = AccumulationSchedule({0: 1, 1: 5})
    fit(Scheduled(None), AccumulationCallback(Uniform()), schedule, linear(), window=1)
    assert len(_after(capsys.readouterr().out, "learning rate: ")) == 1


def _after(text: str, label: str) -> list[str]:
    lines = text.splitlines()
    return [line.split(label, 1)[1] for line in lines if f"| {label}" in line]


# ---- Lightning's finders -------------------------------------------------------------

FOUND = "searches with the present batch, 6 samples. .*Set reference_batch=6 to train"


class Finds(Scheduled):
    lr = 0.1
    batch_size = 3

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> Any:
        return data(self.batch_size, 60 // self.batch_size)


def finder(tmp_path: Path) -> tuple[Any, Any]:
    scaling = linear()
    made = trainer(
        WINDOW, callbacks=[scaling], max_epochs=3, default_root_dir=str(tmp_path)
    )
    return made, scaling


QUIET = pytest.mark.filterwarnings(
    "ignore:.*accumulate_grad_batches:UserWarning",
    "ignore:.*weights_only:UserWarning",
    "ignore:.*srun:UserWarning",
)


@QUIET
def test_rate_that_the_tuner_finds_is_scaled_once(tmp_path: Path) -> None:
    """EDGE_CASES 67. What is found holds for the present batch, which is said."""
    made, scaling = finder(tmp_path)
    module = Finds(None)
    with pytest.warns(UserWarning, match=FOUND):
        found: Any = Tuner(made).lr_find(
            module, num_training=20, early_stop_threshold=None, update_attr=True
        )
    assert module.curve[0][0] == pytest.approx(1e-8)  # the search is not scaled
    assert found.suggestion() == module.lr != 0.1
    module.curve.clear()
    made.fit(module)
    assert deviation([row[:1] for row in module.curve], [[4 * module.lr]] * 30) <= EXACT
    assert [scaled.factor for scaled in scaling.scaled] == [4.0]


@QUIET
def test_rate_that_the_callback_finds_is_scaled_once(tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    search = LearningRateFinder(num_training_steps=20, early_stop_threshold=None)
    module = Finds(None)
    how: dict[str, Any] = {"max_epochs": 3, "default_root_dir": str(tmp_path)}
    made = trainer(WINDOW, callbacks=[linear(), search, Saves(path, 4)], **how)
    with pytest.warns(UserWarning, match="reference_batch=6 to train with the rate"):
        made.fit(module)
    trained = [row[:1] for row in module.curve[20:]]
    assert deviation(trained, [[4 * module.lr]] * 30) <= EXACT
    rest = Finds(None)
    trainer(WINDOW, callbacks=[linear()], **how).fit(
        rest, ckpt_path=path, weights_only=True
    )
    assert deviation([row[:1] for row in rest.curve], trained[2:]) <= EXACT


@QUIET
def test_finder_at_the_reference_is_not_spoken_of(tmp_path: Path) -> None:
    made = trainer(
        WINDOW, callbacks=[linear(reference_batch=6)], default_root_dir=str(tmp_path)
    )
    Tuner(made).lr_find(Finds(None), num_training=5, early_stop_threshold=None)


@QUIET
@pytest.mark.filterwarnings("ignore:BatchSizeFinder:UserWarning")
def test_fit_after_the_batch_size_finder_is_scaled_to_its_size(tmp_path: Path) -> None:
    made, scaling = finder(tmp_path)
    module = Finds(None)
    Tuner(made).scale_batch_size(module, max_trials=1, steps_per_trial=1)
    assert module.batch_size == 2
    module.curve.clear()
    made.fit(module)
    expected = 0.1 * module.batch_size * WINDOW / REFERENCE
    assert {round(row[0], 12) for row in module.curve} == {round(expected, 12)}


@QUIET
def test_finder_with_a_batch_of_unknown_size_names_no_number(tmp_path: Path) -> None:
    scaling = LRScaling("linear", reference_batch=6, unit="tokens")
    made = trainer(WINDOW, callbacks=[scaling], default_root_dir=str(tmp_path))
    match = "whose size in tokens is not known yet.*Set reference_batch to that size"
    with pytest.warns(UserWarning, match=match):
        Tuner(made).lr_find(Finds(None), num_training=5, early_stop_threshold=None)
