"""Training under a schedule equals the big batch over the windows it implies."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import lightning.pytorch as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.loggers.logger import DummyLogger

from tests.helpers import NAIVE
from tests.lit.fronts import RAGGED, micro_batches
from tests.lit.schedule.scheduling import (
    EPOCHS,
    FRONTS,
    PLANS,
    SEQUENCES,
    Watch,
    big_batch_over,
    fitted,
    make,
    off,
    reference,
    schedule,
    token_counts,
    windows_of_plan,
)
from trainkit import AccumulationSchedule, WindowMonitor
from trainkit.core.plan.stages import WindowSize

pytestmark = pytest.mark.filterwarnings("ignore:accumulate_grad_batches=.. the epoch")
EXACT = 1e-10
BY_TURNS = [*zip(PLANS, cycle(FRONTS)), ("by tokens", "manual")]


def test_plans_by_turns_take_every_unit_on_every_front() -> None:
    pairs = {(PLANS[plan][1], front) for plan, front in BY_TURNS}
    assert pairs == {(u, f) for u in ("epoch", "step", "tokens") for f in FRONTS}


@pytest.mark.parametrize(("plan", "front"), BY_TURNS)
@pytest.mark.filterwarnings("ignore:accumulate_grad_batches=25. the epoch has only 10")
def test_schedule_equals_the_big_batch(plan: str, front: str) -> None:
    """pytorch-lightning#5334, yolov5#3722: also where the size changes in mid-epoch,
    with AdamW, whose own count of steps is the number of windows."""
    end, num_steps = reference(plan)
    ours = schedule(plan)
    module, fit = fitted(front, ours)
    assert off(module, end) <= EXACT
    assert fit.global_step == num_steps
    state = fit.optimizers[0].state
    assert {int(each["step"]) for each in state.values()} == {num_steps}
    if ours.stages.unit != "tokens":
        total = ours.total_steps(batches_per_epoch=len(RAGGED), epochs=EPOCHS)
        assert total == num_steps


@pytest.mark.parametrize(
    ("optimizer", "front"), [*zip(cycle(["momentum", "sgd"]), FRONTS)]
)
def test_schedule_with_sgd_equals_the_big_batch(optimizer: str, front: str) -> None:
    """Weight decay and momentum act once a window (pytorch-lightning#19990)."""
    plan = "up and down in mid-epoch"
    module, _ = make(front, optimizer=optimizer)
    fitted(front, schedule(plan), module=module)
    assert off(module, reference(plan, optimizer=optimizer)[0]) <= EXACT


class Naive(pl.Callback):
    """What people write: the Trainer's own number, set where a window ends."""

    def __init__(self, plan: str, *, first_batch: bool) -> None:
        self.windows = windows_of_plan(*PLANS[plan], token_counts())
        self.first_batch = first_batch

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        sizes = {w.start: w for w in self.windows[trainer.current_epoch]}
        if batch_idx in sizes:
            size = len(sizes[batch_idx])
            first = batch_idx if self.first_batch else 0
            trainer.accumulate_grad_batches = WindowSize(size, first)


MID_EPOCH = ["one to four in mid-epoch", "up and down in mid-epoch", "by tokens"]


@pytest.mark.parametrize("plan", MID_EPOCH)
@pytest.mark.filterwarnings("ignore:accumulation. an open window")
def test_naive_switching_does_not_equal_the_big_batch(plan: str) -> None:
    """MultimediaTechLab/YOLO#225 sets the Trainer's number per batch. Also with our
    weights: Lightning zeroes and steps elsewhere."""
    end = reference(plan)[0]
    module, _ = fitted("mixin", Naive(plan, first_batch=False))
    assert off(module, end) > NAIVE
    module, _ = fitted("mixin", Naive(plan, first_batch=True))
    assert off(module, end) <= EXACT


@pytest.mark.parametrize("plan", MID_EPOCH)
def test_schedule_of_plain_lightning_would_not_equal_the_big_batch(plan: str) -> None:
    """Even with the right windows, division by N is wrong for ragged ones."""
    made, _ = make("callback")
    fitted("mixin", Naive(plan, first_batch=True), module=made)
    assert off(made, reference(plan)[0]) > NAIVE


@settings(max_examples=8, deadline=None)
@given(
    plan=st.dictionaries(st.integers(1, 12), st.integers(1, 7), max_size=5),
    first=st.integers(1, 7),
    unit=st.sampled_from(["epoch", "step", "tokens"]),
    num_batches=st.integers(1, 10),
    front=st.sampled_from(FRONTS),
)
@pytest.mark.filterwarnings("ignore:accumulate_grad_batches=")
def test_random_schedule_equals_the_big_batch(
    plan: dict[int, int], first: int, unit: Any, num_batches: int, front: str
) -> None:
    scale = {"epoch": 1, "step": 1, "tokens": 40}[unit]
    stages = {0: first, **{scale * start: size for start, size in plan.items()}}
    sizes = RAGGED[:num_batches]
    windows = windows_of_plan(stages, unit, token_counts(sizes))
    ours = AccumulationSchedule(stages, unit=unit)
    data = micro_batches(SEQUENCES, sizes)
    module, fit = fitted(front, ours, loader=data)
    assert off(module, big_batch_over(windows, sizes)) <= 1e-8
    assert fit.global_step == sum(map(len, windows))


@pytest.mark.parametrize(
    ("front", "start", "end"), [("mixin", 1, 4), ("callback", 4, 1), ("manual", 3, 3)]
)
def test_ramp_equals_the_big_batch(front: str, start: int, end: int) -> None:
    ours = AccumulationSchedule.ramp(start=start, end=end, over=6)
    plan = {i: start + round((end - start) * (i // 2) / 3) for i in range(7)}
    windows = windows_of_plan(plan, "step", token_counts())
    module, fit = fitted(front, ours)
    assert off(module, big_batch_over(windows)) <= EXACT
    assert fit.global_step == ours.total_steps(batches_per_epoch=10, epochs=EPOCHS)


# ---- who reads N ---------------------------------------------------------------------


@pytest.mark.parametrize(("plan", "front"), [*zip(PLANS, cycle(["mixin", "callback"]))])
@pytest.mark.filterwarnings("ignore:accumulate_grad_batches=25. the epoch has only 10")
def test_trainer_says_the_size_of_the_window_under_way(plan: str, front: str) -> None:
    """Lightning zeroes at a window's first batch, steps at its last, and divides the
    loss that it shows by N: times N it is the loss."""
    watch = Watch()
    fitted(front, schedule(plan), watch)
    windows = windows_of_plan(*PLANS[plan], token_counts())
    flat = [
        10 * epoch + i for epoch, ws in enumerate(windows) for w in ws for i in [w.stop]
    ]
    assert watch.stepped == [stop - 1 for stop in flat]
    assert sorted(set(watch.zeroed)) == [0, *flat[:-1]]
    for shown, whole in watch.losses:
        assert shown == pytest.approx(whole, rel=1e-12)
    lengths = [len(w) for ws in windows for w in ws for _ in w]
    assert all(n >= length for n, length in zip(watch.sizes, lengths, strict=True))
    full = [n == length for n, length in zip(watch.sizes, lengths, strict=True)]
    assert sum(full) >= sum(
        len(w) for ws in windows for w in ws[:-1]
    )  # a last window may be short


class AtEpochStart(pl.Callback):
    """Reads N where an epoch begins."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.sizes.append(trainer.accumulate_grad_batches)


def test_trainer_says_the_new_size_when_an_epoch_begins() -> None:
    reads = AtEpochStart()
    fitted("mixin", schedule("fewer by epoch"), reads)
    assert reads.sizes == [4, 2, 1]


class Record(DummyLogger):
    """Keeps what WindowMonitor shows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: Any = None) -> None:
        self.rows.append(metrics)


@pytest.mark.parametrize("front", FRONTS)
def test_monitor_shows_the_size_of_each_window(front: str) -> None:
    logger = Record()
    plan = "up and down in mid-epoch"
    fitted(front, schedule(plan), WindowMonitor(1), logger=logger, log_every_n_steps=1)
    windows = windows_of_plan(*PLANS[plan], token_counts())
    shown = [row["window/micro_batches"] for row in logger.rows]
    assert shown == [len(w) for ws in windows for w in ws]


def test_trainer_gets_its_number_back_after_a_fit() -> None:
    _, fit = fitted("mixin", schedule("fewer by epoch"))
    assert fit.accumulate_grad_batches == 1
    assert type(fit.accumulate_grad_batches) is int
