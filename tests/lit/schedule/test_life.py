"""A schedule among all that a Trainer does: schedulers, early ends, None."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    LearningRateMonitor,
)
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn

from tests.helpers import OPTIMIZERS, TokenNet, pad, trainer, weights
from tests.lit.fronts import RAGGED, Mixed, cut, micro_batches, plain_token_loss
from tests.lit.schedule.scheduling import (
    EPOCHS,
    FRONTS,
    SEQUENCES,
    big_batch_over,
    fitted,
    make,
    off,
    token_counts,
    windows_of_plan,
)
from tests.zoo import OldMixed, OldPlain, old_trainer
from trainkit import AccumulationCallback, AccumulationSchedule, PerToken

EXACT = 1e-10
PLAN = {0: 4, 3: 3, 5: 1}  # by steps: 4 4 2 | 3 3 1 1 1 1 | 1 ...


def plan() -> AccumulationSchedule:
    return AccumulationSchedule(PLAN, unit="step")


def expected(epochs: int = EPOCHS, **how: Any) -> Any:
    windows = windows_of_plan(PLAN, "step", token_counts(), epochs=epochs)
    return big_batch_over(windows, **how)


# ---- schedulers ----------------------------------------------------------------------


class Scheduled(Mixed):
    def __init__(self, interval: str = "step") -> None:
        super().__init__(optimizer="sgd")
        self.interval = interval
        self.rates: list[float] = []

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
    windows = windows_of_plan(PLAN, "step", token_counts())
    steps = [epoch for epoch, ws in enumerate(windows) for _ in ws]
    powers = list(range(len(steps))) if interval == "step" else steps
    assert module.rates == pytest.approx([0.5 * 0.9**power for power in powers])


class Rates(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def log_metrics(self, metrics: dict[str, float], step: Any = None) -> None:
        if "lr-SGD" in metrics:
            self.steps.append(step)


def test_monitor_of_rates_shows_each_step_once() -> None:
    logger = Rates()
    monitor = LearningRateMonitor("step")
    fitted(
        "mixin",
        plan(),
        monitor,
        module=Scheduled(),
        logger=logger,
        log_every_n_steps=1,
    )
    number = sum(map(len, windows_of_plan(PLAN, "step", token_counts())))
    assert sorted(set(logger.steps)) == list(range(number))


@pytest.mark.parametrize("front", FRONTS)
def test_max_steps_under_a_schedule_equals_the_big_batch(front: str) -> None:
    module, fit = fitted(front, plan(), max_steps=6)
    windows = windows_of_plan(PLAN, "step", token_counts(), max_steps=6)
    assert off(module, big_batch_over(windows)) <= EXACT
    assert fit.global_step == 6


# ---- where things end early, or several times ----------------------------------------


class Fails(pl.Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.at:
            self.at = -1
            raise RuntimeError("the disk is full")


@pytest.mark.filterwarnings("ignore:accumulation. an open window")
@pytest.mark.parametrize(
    ("at", "front"), [(5, "mixin"), (15, "callback"), (5, "manual"), (15, "manual")]
)
def test_fit_after_an_exception_equals_fresh_fit(front: str, at: int) -> None:
    made, ours = make(front)
    sizes = AccumulationSchedule({0: 4, 1: 3})
    fit = trainer(callbacks=[sizes, *ours, Fails(at)], max_epochs=EPOCHS)
    with pytest.raises(RuntimeError, match="the disk is full"):
        fit.fit(made, micro_batches(SEQUENCES))
    assert fit.accumulate_grad_batches == 1
    again, ours = make(front)
    fresh = trainer(callbacks=[sizes, *ours], max_epochs=EPOCHS)
    fresh.fit(again, micro_batches(SEQUENCES))
    windows = windows_of_plan({0: 4, 1: 3}, "epoch", token_counts())
    assert off(again, big_batch_over(windows)) <= EXACT


@pytest.mark.parametrize("front", FRONTS)
def test_second_fit_with_the_same_trainer_goes_on_with_the_plan(front: str) -> None:
    module, ours = make(front, optimizer="sgd")
    fit = trainer(callbacks=[plan(), *ours], max_epochs=1)
    fit.fit(module, micro_batches(SEQUENCES))
    fit.fit_loop.max_epochs = EPOCHS
    fit.fit(module, micro_batches(SEQUENCES))
    if front != "manual":  # its own count of windows begins anew
        assert off(module, expected(optimizer="sgd")) <= EXACT
    assert fit.accumulate_grad_batches == 1


class SkipsRest(Mixed):
    """Ends an epoch from `on_train_batch_start`."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 1 and batch_idx == 5 else None


def test_epoch_that_ends_inside_a_window_leaks_nothing() -> None:
    """The next epoch begins with a whole window (transformers#22082)."""
    module = SkipsRest(optimizer="adamw")
    with pytest.warns(UserWarning, match="of 2 micro-batches was dropped"):
        fitted("mixin", plan(), module=module)
    windows = windows_of_plan(PLAN, "step", token_counts())
    windows[1] = [range(0, 3)]
    taken = 4
    windows[2] = [range(0, 3), *(range(i, i + 1) for i in range(3, 10))]
    assert sum(map(len, windows[:2])) == taken
    assert off(module, big_batch_over(windows)) <= EXACT


class Silent(Mixed):
    """Has nothing to say of some batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx in (1, 5) else super().training_step(batch, batch_idx)


def without(sizes: Sequence[int], left_out: set[int], windows: Any) -> Any:
    """The big batch over windows some of whose micro-batches weigh nothing."""
    net = TokenNet(dtype=torch.float64)
    stepper = OPTIMIZERS["adamw"](net.parameters())
    rows = cut(SEQUENCES, sizes)
    for window in (w for ws in windows for w in ws):
        kept = [i for index in window if index not in left_out for i in rows[index]]
        stepper.zero_grad()
        if kept:
            plain_token_loss(net, pad([SEQUENCES[i] for i in kept])).backward()
            stepper.step()
    return weights(net)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_training_step_of_none_weighs_nothing() -> None:
    """The windows stay where they are."""
    module = Silent(optimizer="adamw")
    _, fit = fitted("mixin", AccumulationSchedule({0: 4, 1: 3}), module=module)
    windows = windows_of_plan({0: 4, 1: 3}, "epoch", token_counts())
    assert off(module, without(RAGGED, {1, 5}, windows)) <= EXACT


class Holes(list):  # type: ignore[type-arg]
    """A loader that yields None inside windows."""


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None")
def test_loader_that_yields_none_inside_a_window_changes_nothing() -> None:
    data = Holes(micro_batches(SEQUENCES))
    data[1] = data[6] = None  # neither the first nor the last of a window of 4, 3, 2
    module, _ = fitted("mixin", AccumulationSchedule({0: 4, 5: 2}), loader=data)
    windows = windows_of_plan({0: 4}, "epoch", token_counts())
    assert off(module, without(RAGGED, {1, 6}, windows)) <= EXACT


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None")
def test_loader_that_yields_none_where_the_size_changes_delays_it() -> None:
    """Lightning calls no hook for a batch of None; the next edge is as good."""
    data = Holes(micro_batches(SEQUENCES))
    data[4] = None
    stages = AccumulationSchedule({0: 4, 1: 1}, unit="step")
    module, _ = fitted("mixin", stages, loader=data, max_epochs=1)
    windows = [[range(0, 4), range(4, 8), range(8, 9), range(9, 10)]]
    assert off(module, without(RAGGED, {4}, windows)) <= EXACT


def test_reloaded_loaders_follow_the_plan() -> None:
    """A loader of another length each epoch."""

    class Grows(Mixed):
        def train_dataloader(self) -> Any:
            return micro_batches(SEQUENCES, RAGGED[: 6 + 2 * self.current_epoch])

    module = Grows(optimizer="adamw")
    trainer(
        callbacks=[plan()], max_epochs=EPOCHS, reload_dataloaders_every_n_epochs=1
    ).fit(module)
    windows: list[list[range]] = []
    for epoch in range(EPOCHS):
        before = sum(map(len, windows))
        shifted = {max(s - before, 0): n for s, n in PLAN.items()}
        counts = token_counts(RAGGED[: 6 + 2 * epoch])
        windows += windows_of_plan(shifted, "step", counts, epochs=1)
    assert off(module, big_batch_over(windows)) <= EXACT


@pytest.mark.parametrize(
    ("front", "interval"),
    [("mixin", 1), ("callback", 1), ("manual", 1), ("mixin", 3), ("callback", 0.5)],
)
def test_validation_inside_windows_changes_nothing(front: str, interval: Any) -> None:
    """Lightning clears gradients before it validates, by `_should_accumulate`."""
    module, ours = make(front)
    module.validation_step = lambda batch, batch_idx: None
    fit = trainer(
        callbacks=[plan(), *ours],
        max_epochs=EPOCHS,
        val_check_interval=interval,
        num_sanity_val_steps=1,
    )
    fit.fit(module, micro_batches(SEQUENCES), micro_batches(SEQUENCES, [4]))
    assert off(module, expected()) <= EXACT


# ---- both namespaces -----------------------------------------------------------------


@pytest.mark.parametrize("front", ["mixin", "callback"])
def test_schedule_in_the_other_namespace_equals_the_big_batch(front: str) -> None:
    module: Any = OldMixed() if front == "mixin" else OldPlain()
    ours = [] if front == "mixin" else [AccumulationCallback(PerToken())]
    callbacks: Any = [plan(), *ours]
    fit = old_trainer(callbacks=callbacks, max_epochs=EPOCHS)
    fit.fit(module, micro_batches(SEQUENCES))
    assert off(module, expected(optimizer="momentum")) <= EXACT


# ---- several optimizers --------------------------------------------------------------


class TwoOptimizers(Mixed):
    """One loss for each half, with parameters toggled while windows are open."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.frozen: list[bool] = []

    def configure_optimizers(self) -> Any:
        halves = (self.net.embed, self.net.head)
        return [torch.optim.SGD(half.parameters(), lr=0.3) for half in halves]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        ends = self.window_ends(batch_idx)
        for optimizer in optimizers:
            self.toggle_optimizer(optimizer)
            self.accumulate(self.loss(self.net, batch), batch, optimizer=optimizer)
            if ends:
                self.finish_window(optimizer)
                optimizer.step()
                optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
            self.frozen += [not p.requires_grad for p in self.net.parameters()]


def summed(net: nn.Module, indices: Sequence[int], rows: Any) -> Any:
    """The sum of the losses of some micro-batches."""
    samples = [SEQUENCES[i] for index in indices for i in rows[index]]
    return plain_token_loss(net, pad(samples), "sum")


def test_two_toggled_optimizers_equal_the_big_batch() -> None:
    """pytorch-lightning#8284: untoggled although windows stay open. On a window's last
    micro-batch the second loss sees the first optimizer's step."""
    module = TwoOptimizers()
    _, fit = fitted("mixin", plan(), module=module)
    assert not any(module.frozen)
    net = TokenNet(dtype=torch.float64)
    halves = [list(half.parameters()) for half in (net.embed, net.head)]
    steppers = [torch.optim.SGD(half, lr=0.3) for half in halves]
    rows, counts = cut(SEQUENCES, RAGGED), token_counts()
    windows = windows_of_plan(PLAN, "step", counts)
    for window in (w for ws in windows for w in ws):
        total = sum(counts[i] for i in window)
        first = torch.autograd.grad(summed(net, window, rows) / total, halves[0])
        second = [torch.zeros_like(p) for p in halves[1]]
        if len(window) > 1:
            early = summed(net, window[:-1], rows) / total
            second = list(torch.autograd.grad(early, halves[1]))
        for parameter, gradient in zip(halves[0], first, strict=True):
            parameter.grad = gradient
        steppers[0].step()
        late = torch.autograd.grad(summed(net, window[-1:], rows) / total, halves[1])
        for parameter, one, other in zip(halves[1], second, late, strict=True):
            parameter.grad = one + other
        steppers[1].step()
    assert off(module, weights(net)) <= EXACT
    assert fit.global_step == 2 * sum(map(len, windows))
