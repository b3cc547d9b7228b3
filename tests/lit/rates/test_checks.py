"""What LRScaling says before training, what it refuses, and what it logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.tuner.tuning import Tuner

from tests.core.plan.schedulers import deviation
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
)
from trainkit import AccumulationCallback, Uniform
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


@pytest.mark.parametrize("kind", [numpy.int64, numpy.float32, numpy.float64, int])
def test_number_of_numpy_is_a_number(kind: Any) -> None:
    scaling = LRScaling(lambda k: kind(k), reference_batch=kind(3), micro_batch=kind(6))
    module = fit(Scheduled(None), scaling)
    assert scaling.k == 4.0
    assert deviation([row[:2] for row in module.curve], [[0.2, 0.8]] * 10) <= EXACT


def test_reference_batch_must_be_given() -> None:
    """mmpretrain#1763: what batch a rate is meant for is the first thing people ask."""
    with pytest.raises(TypeError, match="reference_batch"):
        LRScaling("linear")  # type: ignore[call-arg]


def test_k_before_the_batch_is_known_is_refused() -> None:
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


# ---- the plan ------------------------------------------------------------------------


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


def test_hyperparameters_are_logged_once_and_later_changes_as_metrics() -> None:
    """MLflow, for one, refuses another value of a parameter."""
    parameters: list[float] = []
    seen: list[tuple[float, float, int | None]] = []

    class Logger(DummyLogger):
        def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
            parameters.append(params["lr_scaling"]["k"])

        def log_metrics(
            self, metrics_: Any = None, step: Any = None, **how: Any
        ) -> None:  # type: ignore[override]
            found = metrics_ or how["metrics"]
            if "lr_scaling/k" in found:
                size = found["lr_scaling/effective_batch"]
                seen.append((found["lr_scaling/k"], size, step))

    schedule = AccumulationSchedule({0: 1, 4: 2, 7: 5}, unit="step")
    callbacks = [AccumulationCallback(Uniform()), schedule, linear()]
    fit(Scheduled(None), *callbacks, window=1, logger=Logger(), log_every_n_steps=1)
    assert parameters == [2.0]
    assert seen == [(4.0, 6.0, 4), (10.0, 15.0, 7)]


# ---- schedulers by frequency ---------------------------------------------------------


def steps_of_scheduler(frequency: int, window: int, *callbacks: Any) -> list[float]:
    """A rate that halves whenever its scheduler steps."""
    module = Scheduled("MultiplicativeLR", (1.0,), frequency=frequency)
    fit(module, *callbacks, window=window, loader=data(batches=16), max_epochs=1)
    return [round(row[0], 9) for row in module.curve]


def geometric(*exponents: int) -> list[float]:
    return [round(0.9**e, 9) for e in exponents]


def test_frequency_of_lightning_counts_batches() -> None:
    """With N = 4 every step, and with N = 1 every other."""
    assert steps_of_scheduler(2, 4) == geometric(0, 1, 2, 3)
    assert steps_of_scheduler(2, 1)[:6] == geometric(0, 0, 1, 1, 2, 2)


def test_frequency_over_windows_is_said_with_a_fix_that_fixes() -> None:
    none = LRScaling("none", reference_batch=1)
    with pytest.warns(UserWarning, match=r"MultiplicativeLR.* Set frequency=8 \(2 "):
        steps_of_scheduler(2, 4, none)
    assert steps_of_scheduler(8, 4) == geometric(0, 0, 1, 1)


def test_frequency_under_a_schedule_is_said_with_another_fix() -> None:
    schedule = AccumulationSchedule({0: 1, 4: 2}, unit="step")
    none = LRScaling("none", reference_batch=1)
    callbacks = [AccumulationCallback(Uniform()), schedule, none]
    with pytest.warns(UserWarning, match="Set frequency=1 and make the scheduler's ow"):
        steps_of_scheduler(2, 1, *callbacks)


@pytest.mark.parametrize(("frequency", "window"), [(1, 4), (2, 1), (1, 1), (8, 4)])
def test_frequency_that_is_right_is_not_spoken_of(frequency: int, window: int) -> None:
    assert steps_of_scheduler(frequency, window, linear())


# ---- schedulers of others ------------------------------------------------------------


class Warm(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer: Any) -> None:
        self.warmup_lr = 0.01
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        rates: list[Any] = list(self.base_lrs)
        return [self.warmup_lr for _ in rates] if self.last_epoch < 3 else rates


class Foreign(Scheduled):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": Warm(optimizer), "interval": "step"}]


def test_foreign_scheduler_is_spoken_of() -> None:
    with pytest.warns(UserWarning, match="Warm: it is not one of torch's schedulers"):
        module = fit(Foreign(None), linear())
    assert [row[0] for row in module.curve][:4] == [0.04, 0.01, 0.01, 0.4]


def test_named_rates_of_a_foreign_scheduler_are_scaled() -> None:
    fit(Foreign(None), linear(scheduler_rates=[]))
    module = fit(Foreign(None), linear(scheduler_rates=["warmup_lr"]))
    assert [row[0] for row in module.curve] == pytest.approx([0.04] * 3 + [0.4] * 7)


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
