"""A schedule among all that a Trainer does, and what is refused beside it."""

from __future__ import annotations

import re
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner.tuning import Tuner
from torch import nn
from transformers import get_cosine_schedule_with_warmup

from tests.helpers import run_ranks, trainer
from tests.lit.fronts import RAGGED, Mixed, Plain, micro_batches
from tests.lit.schedule.scheduling import (
    EPOCHS,
    EXACT,
    FRONTS,
    SEQUENCES,
    Watch,
    batches,
    ends_of,
    fitted,
    make,
    number_of,
    off,
    rows_of,
    schedule_of,
    windows_of_plan,
)
from tests.zoo.modules import Manual, OldMixed, hooked, old_trainer
from trainkit import AccumulationCallback, AccumulationSchedule, PerSample, Uniform
from trainkit.errors import TrainkitError

PLAN = {0: 4, 3: 3, 5: 1}  # by steps: 4 4 2 | 3 3 1 1 1 1 | 1 ...
WINDOWS = windows_of_plan(PLAN, "step")
FOUR_THREE = {0: 4, 1: 3}  # by epochs


def plan() -> AccumulationSchedule:
    return AccumulationSchedule(PLAN, unit="step")


# ---- schedulers ----------------------------------------------------------------------


class Scheduled(Mixed):
    def __init__(self, interval: str) -> None:
        super().__init__(optimizer="sgd")
        self.interval, self.rates = interval, list[float]()

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": self.interval}]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_scheduler_steps_once_a_window_or_epoch(interval: str) -> None:
    """pytorch-lightning#6359: N times as fast, or as slow, where N was changed."""
    module = Scheduled(interval)
    fitted("mixin", plan(), module=module)
    epochs = [epoch for epoch, windows in enumerate(WINDOWS) for _ in windows]
    powers = list(range(len(epochs))) if interval == "step" else epochs
    assert module.rates == pytest.approx([0.5 * 0.9**power for power in powers])


# ---- where things end early, several times, or inside windows ------------------------


@pytest.mark.filterwarnings("ignore:accumulation. an open window")
@pytest.mark.parametrize("front", FRONTS)
def test_fit_after_an_exception_equals_fresh_fit(front: str) -> None:
    module, ours = make(front)
    sizes = AccumulationSchedule(FOUR_THREE)

    def fail(trainer: Any, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx == (15 if front == "callback" else 5):
            raise RuntimeError("the disk is full")

    fails = LambdaCallback(on_train_batch_end=fail)
    fit = trainer(callbacks=[sizes, *ours, fails], max_epochs=EPOCHS)
    with pytest.raises(RuntimeError, match="the disk is full"):
        fit.fit(module, micro_batches(SEQUENCES))
    assert fit.accumulate_grad_batches == 1
    again, _ = fitted(front, sizes)
    assert off(again, windows_of_plan(FOUR_THREE, "epoch")) <= EXACT


@pytest.mark.parametrize("front", ["mixin", "callback"])
def test_second_fit_with_the_same_trainer_follows_the_plan(front: str) -> None:
    module, ours = make(front, optimizer="sgd")
    fit = trainer(callbacks=[plan(), *ours], max_epochs=1)
    fit.fit(module, micro_batches(SEQUENCES))
    fit.fit_loop.max_epochs = EPOCHS
    fit.fit(module, micro_batches(SEQUENCES))
    assert off(module, WINDOWS, optimizer="sgd") <= EXACT
    assert fit.accumulate_grad_batches == 1


def test_a_checkpoint_of_no_training_holds_nothing_of_it() -> None:
    ours = AccumulationSchedule({0: 2})
    assert ours.state_dict() == {}
    ours.load_state_dict({"size": 2})
    assert ours.state_dict() == {"size": 2}  # a finder saves it before training


def test_epoch_that_ends_inside_a_window_leaks_nothing() -> None:
    """The next epoch begins with a whole window (transformers#22082)."""

    def skip_rest(self: Any, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 1 and batch_idx == 5 else None

    module = hooked(Mixed, on_train_batch_start=skip_rest)(optimizer="adamw")
    with pytest.warns(UserWarning, match="of 2 micro-batches was dropped"):
        fitted("mixin", plan(), module=module)
    ones = (range(i, i + 1) for i in range(3, 10))  # after four steps and one more
    assert off(module, [WINDOWS[0], [range(3)], [range(3), *ones]]) <= EXACT


class Silent(Mixed):
    """Has nothing to say of some batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx in (1, 5) else super().training_step(batch, batch_idx)


class Holes(list):  # type: ignore[type-arg]
    """A loader that yields None at some places; a plain list would be many loaders."""

    def __init__(self, *at: int) -> None:
        batches = enumerate(micro_batches(SEQUENCES))
        super().__init__(None if i in at else batch for i, batch in batches)


SIX = windows_of_plan(PLAN, "step", max_steps=6)
LATE = [[range(4), range(4, 8), range(8, 9), range(9, 10)]]


@pytest.mark.parametrize(
    ("front", "sizes", "how", "windows", "left_out"),
    [
        *((front, PLAN, {"max_steps": 6}, SIX, set()) for front in FRONTS),
        ("mixin", {0: 4, 3: 3}, {"module": Silent(optimizer="adamw")}, None, {1, 5}),
        ("mixin", {0: 4}, {"loader": Holes(1, 6)}, None, {1, 6}),
        # Lightning calls no hook for a batch of None; the next edge is as good.
        ("mixin", {0: 4, 1: 1}, {"loader": Holes(4), "max_epochs": 1}, LATE, {4}),
    ],
)
@pytest.mark.filterwarnings("ignore:`training_step` returned `N", "ignore:.*yielded No")
def test_end_by_steps_or_none_leaves_windows_where_they_are(
    front: str, sizes: Any, how: Any, windows: Any, left_out: set[int]
) -> None:
    module, _ = fitted(front, AccumulationSchedule(sizes, unit="step"), **how)
    windows = windows or windows_of_plan(sizes, "step")
    assert off(module, windows, left_out=left_out) <= EXACT


def test_reloaded_loaders_follow_the_plan() -> None:
    """A loader of another length each epoch."""

    class Grows(Mixed):
        def train_dataloader(self) -> Any:
            return micro_batches(SEQUENCES, RAGGED[: 6 + 2 * self.current_epoch])

    module = Grows(optimizer="adamw")
    how = {"max_epochs": EPOCHS, "reload_dataloaders_every_n_epochs": 1}
    trainer(callbacks=[plan()], **how).fit(module)
    windows: list[list[range]] = []
    for epoch in range(EPOCHS):
        shifted = {max(s - number_of(windows), 0): n for s, n in PLAN.items()}
        rows = rows_of(RAGGED[: 6 + 2 * epoch])
        windows += windows_of_plan(shifted, "step", rows, epochs=1)
    assert off(module, windows) <= EXACT


def test_schedule_in_the_other_namespace_equals_the_big_batch() -> None:
    module = OldMixed()
    fit = old_trainer(callbacks=[plan()], max_epochs=EPOCHS)  # type: ignore[list-item]
    fit.fit(module, micro_batches(SEQUENCES))
    assert off(module, WINDOWS, optimizer="momentum") <= EXACT


# ---- beside Lightning's callbacks that set the Trainer's numbers ---------------------


class Found(Mixed):
    """What the finders look for."""

    batch_size = 2
    lr = 0.1

    def train_dataloader(self) -> Any:
        return batches(self.batch_size)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.mark.filterwarnings("ignore:.*Finder. Lightning takes all other")
@pytest.mark.parametrize("finder", ["as a callback", "by the tuner"])
def test_fit_after_a_finder_follows_the_whole_plan(finder: str, capsys: Any) -> None:
    """pytorch-lightning#18394, #13851: the new size counts, nothing stays truncated.
    pytorch-lightning#1726; frgfm/holocron#504: a partial window was left over."""
    module, watch = Found(), Watch()
    sizes = {"max_trials": 2, "steps_per_trial": 3}
    is_callback = finder == "as a callback"
    found = [BatchSizeFinder(**sizes), LearningRateFinder(num_training_steps=9)]  # type: ignore[arg-type]
    fit = trainer(callbacks=[plan(), *(found if is_callback else ()), watch])
    if not is_callback:
        Tuner(fit).lr_find(module, num_training=9)
        Tuner(fit).scale_batch_size(module, **sizes)  # type: ignore[arg-type]
        watch.__init__()
    fit.fit(module)
    size = module.batch_size
    assert size > 2
    rows = [SEQUENCES[i : i + size] for i in range(0, len(SEQUENCES), size)]
    windows = windows_of_plan(PLAN, "step", rows, epochs=2)
    assert fit.global_step == number_of(windows)
    assert watch.stepped == ends_of(windows, len(rows))
    assert fit.accumulate_grad_batches == 1
    text = f"per-device batch {size} x accumulation 4 x ranks 1 = {4 * size} samples"
    assert text in capsys.readouterr().out


def test_schedule_with_weight_averaging_keeps_its_windows() -> None:
    """Its last epoch, for BatchNorm's statistics, sets the number itself."""
    module, watch = Mixed(), Watch()
    module.norm = nn.BatchNorm1d(3)
    averaging = StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)
    _, fit = fitted("mixin", plan(), averaging, watch, module=module)
    ends = ends_of(WINDOWS)
    assert watch.stepped[: len(ends)] == ends
    assert fit.accumulate_grad_batches == 1


# ---- refused, or named, beforehand ---------------------------------------------------

HALVED = {0: 4, 1: 2}  # over epochs of ten batches: 3 + 5 + 5 steps
PLANNED = AccumulationSchedule(HALVED)
BY_TOKENS = AccumulationSchedule(HALVED, unit="tokens")
GROWS = AccumulationSchedule({0: 1, 1: 2})  # its first windows would pass


class Another(AccumulationSchedule):
    """Two of one type are refused by Lightning itself, for their state's sake."""


def meddles(hook: str) -> pl.Callback:
    """MultimediaTechLab/YOLO#225 sets the number in a callback, for each batch."""
    return LambdaCallback(
        **{hook: lambda trainer, *_: setattr(trainer, "accumulate_grad_batches", 3)}
    )


@pytest.mark.parametrize(
    ("make", "callbacks", "text"),
    [
        (Mixed, [GradientAccumulationScheduler({0: 2})], "onScheduler says one too"),
        (Mixed, [Another({0: 2})], "and Another says one too. Keep one of them"),
        (Plain, [], "needs the callback that weighs and divides"),
        *(
            (Mixed, [meddles(hook)], "it, and somebody else has set it to 3. Leave it")
            for hook in ("on_fit_start", "on_train_start", "on_train_batch_end")
        ),
        (Plain, [BY_TOKENS, AccumulationCallback(PerSample())], "PerSample does not w"),
        (Plain, [BY_TOKENS, AccumulationCallback(Uniform())], "Uniform does not weig"),
    ],
)
@pytest.mark.filterwarnings("ignore:accumulation. an op")
def test_what_a_schedule_cannot_work_with_is_refused(
    make: Any, callbacks: list[Any], text: str
) -> None:
    is_there = BY_TOKENS in callbacks
    with pytest.raises(TrainkitError, match=text):
        fitted("mixin", *([] if is_there else [PLANNED]), *callbacks, module=make())


@pytest.mark.parametrize("make", [Mixed, Plain, Manual])
def test_schedule_beside_a_number_of_the_trainer_is_refused(make: Any) -> None:
    text = r"Trainer\(accumulate_grad_batches=3\) says one too. Keep one"
    text = "accumulate_grad_batches" if make is Manual else text
    with pytest.raises(TrainkitError, match=text):
        fitted("mixin", PLANNED, module=make(), accumulate=3)


def train_static(rank: int, world: int) -> None:
    strategy = DDPStrategy(static_graph=True)
    how = {"devices": world, "use_distributed_sampler": False}
    fitted("mixin", GROWS, strategy=strategy, **how)


def test_static_graph_is_refused_before_the_first_long_window() -> None:
    (error,) = run_ranks(train_static, 1)
    assert "static_graph=True: DDP cannot run a window of several" in str(error)


# ---- schedulers made for another number of steps -------------------------------------


class Asks(Mixed):
    """Makes a scheduler for the estimated or for the true number of steps."""

    def __init__(self, asks: str, *, interval: str = "step") -> None:
        super().__init__(optimizer="sgd")
        self.asks = asks
        self.interval = interval

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        total = 7
        if "estimated" in self.asks:
            total = int(self.trainer.estimated_stepping_batches)
        if "true" in self.asks:
            total = schedule_of(self).total_steps(self.trainer)
        scheduler = get_cosine_schedule_with_warmup(optimizer, 2, total)
        return [optimizer], [{"scheduler": scheduler, "interval": self.interval}]


def said_of(
    asks: str,
    plan: Any = HALVED,
    unit: Any = "epoch",
    *,
    interval: str = "step",
    **how: Any,
) -> list[str]:
    """What is said of a scheduler. Filters turn any other warning into an error."""
    module = Asks(asks, interval=interval)
    ours = AccumulationSchedule(plan, unit=unit)
    with warnings.catch_warnings(record=True) as said:
        warnings.filterwarnings("always", ".*estimated_stepping_batches: it was read")
        # Schedulers are looked at before the first window.
        fitted("mixin", ours, module=module, max_steps=1, **how)
    return [str(warning.message) for warning in said]


@pytest.mark.parametrize(
    ("plan", "unit", "asks_for"),
    [
        (HALVED, "epoch", r"self.trainer\)"),
        ({0: 4, 5000: 2}, "tokens", r"self.trainer, tokens_per_micro_batch=...\)"),
    ],
)
def test_who_asks_for_the_estimate_alone_is_told_whom_to_ask(
    plan: Any, unit: Any, asks_for: str
) -> None:
    (said,) = said_of("estimated", plan, unit)
    assert "takes windows of the first size, 4, for all" in said
    assert re.search(rf"take schedule.total_steps\({asks_for}", said)


@pytest.mark.parametrize(
    ("asks", "plan", "how"),
    [
        ("true", HALVED, {}),
        ("estimated and true", HALVED, {}),
        ("neither", HALVED, {}),
        ("estimated", HALVED, {"interval": "epoch"}),
        ("estimated", {0: 4}, {}),
    ],
)
def test_nobody_else_is_told(asks: str, plan: Any, how: Any) -> None:
    assert said_of(asks, plan, **how) == []
