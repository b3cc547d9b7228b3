"""What is planned before training is what training then does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, LRScheduler

from tests.helpers import quiet_lightning, weights
from tests.lit.rates.scaled import BATCHES, EXACT, STEPS, Saves, Scheduled, fit, linear
from trainkit import (
    AccumulationCallback,
    AccumulationSchedule,
    LearningRates,
    LRScaling,
    MetricsCSVLogger,
    PerSample,
    warmup_cosine,
)
from trainkit.lit.rates.planned_rates import RatePlan, plan_rates

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*no learning rate schedulers:RuntimeWarning"),
    # torch's own, when a SequentialLR is made of others
    pytest.mark.filterwarnings(
        "ignore:Detected call of .lr_scheduler.step:UserWarning"
    ),
]


class Plans(Callback):
    """Plans where the command does."""

    plan: RatePlan

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.plan = plan_rates(trainer, pl_module)


def planned(
    module: Any, *callbacks: Any, folder: Path, **how: Any
) -> tuple[RatePlan, list[list[float]]]:
    """The plan, and for each step the rates that were used."""
    plans = Plans()
    # In the order in which a configuration makes them.
    rates = LearningRates(logging_interval="step")
    all_of_them = [rates, *callbacks, AccumulationCallback(PerSample()), plans]
    with quiet_lightning():
        logger = MetricsCSVLogger(folder)
        fit(module, *all_of_them, logger=logger, log_every_n_steps=1, **how)
    num_groups = len(module.first)
    return plans.plan, [row[:num_groups] for row in module.curve]


def assert_same(plan: RatePlan, used: list[list[float]], *, first: int = 0) -> None:
    assert plan.why_not == ""
    assert plan.steps == list(range(first, first + len(used)))
    rows = zip(*plan.rates.values(), strict=True)
    for step, (row, really) in enumerate(zip(rows, used, strict=True)):
        assert row == pytest.approx(really, rel=EXACT), step


@pytest.mark.parametrize(
    ("name", "interval"),
    [
        (None, "step"),
        ("ExponentialLR", "epoch"),
        ("CyclicLR-triangular2", "step"),
        ("OneCycleLR-cos", "step"),
        ("SequentialLR-nested", "step"),
        ("ChainedScheduler", "epoch"),
    ],
)
def test_the_plan_equals_the_rates_that_were_used(
    name: str | None, interval: str, tmp_path: Path
) -> None:
    module = Scheduled(name, interval=interval)
    plan, used = planned(module, folder=tmp_path)
    assert len(used) == 2 * STEPS
    assert list(plan.rates) == ["lr-SGD/pg1", "lr-SGD/pg2"]
    assert_same(plan, used)
    if name is not None:  # the control: it is no constant
        assert len({row[0] for row in used}) > 1


@pytest.mark.parametrize(
    ("sizes", "interval"), [({0: 4, 1: 1}, "step"), ({0: 1, 3: 2}, "epoch")]
)
@pytest.mark.parametrize("rule", ["linear", "gain"])
def test_it_follows_scaling_warm_up_and_windows_of_other_sizes(
    sizes: dict[int, int], interval: str, rule: Any, tmp_path: Path
) -> None:
    schedule = AccumulationSchedule(sizes, unit="epoch" if 1 in sizes else "step")
    module = Scheduled("ExponentialLR", interval=interval)
    noise_scale = 5 if rule == "gain" else None
    how: dict[str, Any] = {"reference_batch": 1.5, "noise_scale": noise_scale}
    scaling = LRScaling(rule, warmup_steps=3, **how)
    plan, used = planned(module, schedule, scaling, folder=tmp_path, window=1)
    assert_same(plan, used)
    unscaled = Scheduled("ExponentialLR", interval=interval)
    _, without = planned(unscaled, schedule, folder=tmp_path / "2", window=1)
    assert used[-1] != pytest.approx(without[-1], rel=0.1)  # the control


def test_planning_changes_nothing(tmp_path: Path) -> None:
    how: dict[str, Any] = {"optimizer": torch.optim.AdamW}
    one, other = (Scheduled("OneCycleLR-cos", **how) for _ in range(2))
    torch.manual_seed(0)
    _, used = planned(one, linear(), folder=tmp_path)
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    fit(other, linear(), AccumulationCallback(PerSample()))
    assert torch.equal(weights(one), weights(other))
    assert used == [row[:2] for row in other.curve]
    assert torch.equal(state, torch.random.get_rng_state())


class Own(LRScheduler):
    """May communicate with other ranks, or write files."""

    def get_lr(self) -> Any:
        return [rate / (1 + self.last_epoch) for rate in self.base_lrs]


class Remembering(Scheduled):
    """Its rate comes from a function of the user's, or from a class.

    Attributes:
        calls: of the function.
    """

    def __init__(self, kind: str) -> None:
        super().__init__("StepLR")
        self.kind = kind
        self.calls: list[int] = []

    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        makers: dict[str, Any] = {
            "own class": Own,
            "lambda": lambda o: LambdaLR(o, lambda step: self.note(step)),
            "partial": lambda o: LambdaLR(o, partial(_falling, 4)),
            "method": lambda o: LambdaLR(o, self.note),
            "chained": lambda o: ChainedScheduler([LambdaLR(o, self.note)]),
            "trainkit's": lambda o: warmup_cosine(o, total_steps=9, warmup=0.3),
        }
        scheduler = makers[self.kind](found["optimizer"])
        return {**found, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def note(self, step: int) -> float:
        self.calls.append(step)
        return 1 / (4 + len(self.calls))


def _falling(warmup: int, step: int) -> float:
    return warmup / (warmup + step)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("own class", "Own"),
        ("lambda", "<lambda>"),
        ("partial", "_falling"),
        ("method", "note"),
        ("chained", "note"),
        ("trainkit's", ""),  # the control
    ],
)
def test_a_function_of_the_users_is_not_called(
    kind: str, name: str, tmp_path: Path
) -> None:
    """On one of several ranks it would else have another rate from then on."""
    one, other = Remembering(kind), Remembering(kind)
    plan, used = planned(one, folder=tmp_path, max_epochs=1)
    fit(other, AccumulationCallback(PerSample()), max_epochs=1)
    assert used == [row[:2] for row in other.curve]
    assert one.calls == other.calls
    assert len({row[0] for row in used}) > 1  # it is no constant
    if name:
        assert f"{name} may remember its calls" in plan.why_not
    else:
        assert_same(plan, used)


class StepsItself(Scheduled):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        pass


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint:UserWarning")
def test_a_resumed_run_plans_the_rest(tmp_path: Path) -> None:
    saves = Saves(tmp_path / "c.ckpt", after=6)  # three steps
    whole = Scheduled("CosineAnnealingWarmRestarts")
    _, used = planned(whole, saves, linear(), folder=tmp_path)
    again = Scheduled("CosineAnnealingWarmRestarts")
    later, rest = planned(
        again, linear(), folder=tmp_path / "2", ckpt_path=tmp_path / "c.ckpt"
    )
    assert_same(later, rest, first=3)
    assert rest == used[3:]


class Unsized:
    """Batches of a loader that does not say their size."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.ones(3, 1, dtype=torch.float64)] * BATCHES)

    def __len__(self) -> int:
        return BATCHES


class Stops(Callback):
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        trainer.should_stop = True


@pytest.mark.parametrize(
    ("module", "callbacks", "how", "why"),
    [
        (Scheduled("ReduceLROnPlateau"), [], {}, "goes by a metric"),
        (StepsItself("StepLR"), [], {}, "an lr_scheduler_step of its own"),
        (Scheduled("StepLR", frequency=2), [], {}, "a frequency other than 1"),
        (Scheduled("StepLR"), [Stops()], {"max_epochs": -1}, "no end that is known"),
        (
            Scheduled("StepLR"),
            [linear()],
            {"loader": Unsized()},
            "the first windows are measured",
        ),
    ],
    ids=["plateau", "steps-itself", "frequency", "endless", "measured"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_cannot_be_known_is_said(
    module: Any, callbacks: list[Any], how: dict[str, Any], why: str, tmp_path: Path
) -> None:
    plan, _ = planned(module, *callbacks, folder=tmp_path, **how)
    assert why in plan.why_not
    assert plan.rates == {}


class Breaks:
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("not to be copied")


def test_a_scheduler_that_cannot_be_run_ahead_trains_all_the_same(
    tmp_path: Path,
) -> None:
    class Odd(Scheduled):
        def configure_optimizers(self) -> Any:
            found = super().configure_optimizers()
            found["lr_scheduler"]["scheduler"].extra = Breaks()
            return found

    module = Odd("StepLR")
    plan, used = planned(module, folder=tmp_path)
    assert "cannot be run ahead (RuntimeError: not to be copied)" in plan.why_not
    assert len(used) == 2 * math.ceil(BATCHES / 2)
