"""Training under a schedule equals the big batch over the windows it implies."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import lightning.pytorch as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader

from tests.helpers import (
    NAIVE,
    ragged_sequences,
    raise_rank_errors,
    rank_loader,
    run_cases,
    weights,
)
from tests.lit.fronts import RAGGED, Mixed, micro_batches
from tests.lit.schedule.scheduling import (
    EPOCHS,
    EXACT,
    FRONTS,
    PLANS,
    SEQUENCES,
    Watch,
    batches,
    ends_of,
    fitted,
    make,
    number_of,
    off,
    rows_of,
    schedule,
    schedule_of,
    windows_of_plan,
)
from tests.zoo.callbacks import Table
from tests.zoo.modules import Stream
from trainkit import AccumulationSchedule, WindowMonitor
from trainkit.core.plan.stages import WindowSize
from trainkit.errors import TrainkitError

pytestmark = pytest.mark.filterwarnings("ignore:accumulate_grad_batches=.* the epoch")
UP_AND_DOWN = "up and down in mid-epoch"
BY_TURNS = [
    *zip(PLANS, cycle(["mixin", "callback"]), cycle(["adamw"])),
    *(
        (plan, "manual", "adamw")
        for plan in ("more by epoch", UP_AND_DOWN, "by tokens")
    ),
    (UP_AND_DOWN, "mixin", "momentum"),
    (UP_AND_DOWN, "callback", "sgd"),
    (UP_AND_DOWN, "manual", "momentum"),
]


@pytest.mark.parametrize(("plan", "front", "optimizer"), BY_TURNS)
def test_schedule_equals_the_big_batch(plan: str, front: str, optimizer: str) -> None:
    """pytorch-lightning#5334, yolov5#3722: also where the size changes in mid-epoch,
    with AdamW, whose own count of steps is the number of windows. Weight decay and
    momentum act once a window (pytorch-lightning#19990)."""
    ours, watch, logger = schedule(plan), Watch(), Table()
    module, _ = make(front, optimizer=optimizer)
    how: dict[str, Any] = {"logger": logger, "log_every_n_steps": 1}
    _, fit = fitted(front, ours, watch, WindowMonitor(1), module=module, **how)
    windows = windows_of_plan(*PLANS[plan])
    assert off(module, windows, optimizer=optimizer) <= EXACT
    assert fit.global_step == number_of(windows)
    if optimizer == "adamw":
        state = fit.optimizers[0].state.values()
        assert {int(each["step"]) for each in state} == {number_of(windows)}
    if ours.stages.unit != "tokens":
        assert ours.stages.num_steps(len(RAGGED), EPOCHS) == number_of(windows)
    shown = logger.column("window/micro_batches")
    assert shown == [len(window) for ws in windows for window in ws]
    assert (fit.accumulate_grad_batches, type(fit.accumulate_grad_batches)) == (1, int)
    if front != "manual":
        check_what_the_trainer_says(watch, windows)
    if ours.stages.unit == "epoch":
        assert watch.sizes_of_epochs == [ours.stages.at(i) for i in range(EPOCHS)]


def check_what_the_trainer_says(watch: Watch, windows: list[list[range]]) -> None:
    """Lightning zeroes at a window's first batch, steps at its last, and divides the
    loss that it shows by N: times N it is the loss."""
    assert watch.stepped == ends_of(windows)
    assert sorted(set(watch.zeroed)) == [0, *(end + 1 for end in ends_of(windows)[:-1])]
    for shown, whole in watch.losses:
        assert shown == pytest.approx(whole, rel=1e-12)
    sizes = iter(watch.sizes)
    for *before, last in windows:
        for window in before:
            assert {next(sizes) for _ in window} == {len(window)}
        assert all(next(sizes) >= len(last) for _ in last)  # it may be short


class Naive(pl.Callback):
    """What people write: the Trainer's own number, set where a window ends."""

    def __init__(self, plan: str, *, first_batch: bool) -> None:
        self.windows = windows_of_plan(*PLANS[plan])
        self.first_batch = first_batch

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        sizes = {w.start: w for w in self.windows[trainer.current_epoch]}
        if batch_idx in sizes:
            size = len(sizes[batch_idx])
            first = batch_idx if self.first_batch else 0
            trainer.accumulate_grad_batches = WindowSize(size, first)


@pytest.mark.parametrize("plan", ["one to four in mid-epoch", UP_AND_DOWN, "by tokens"])
@pytest.mark.filterwarnings("ignore:accumulation. an open window")
def test_naive_switching_does_not_equal_the_big_batch(plan: str) -> None:
    """MultimediaTechLab/YOLO#225 sets the Trainer's number per batch. Also with our
    weights: Lightning zeroes and steps elsewhere. And with the right windows: its
    division by N is wrong for ragged ones."""
    windows = windows_of_plan(*PLANS[plan])
    module, _ = fitted("mixin", Naive(plan, first_batch=False))
    assert off(module, windows) > NAIVE
    module, _ = fitted("mixin", Naive(plan, first_batch=True))
    assert off(module, windows) <= EXACT
    plain, _ = make("callback")
    fitted("mixin", Naive(plan, first_batch=True), module=plain)
    assert off(plain, windows) > NAIVE


@settings(max_examples=8)
@given(
    plan=st.dictionaries(st.integers(1, 12), st.integers(1, 7), max_size=5),
    first=st.integers(1, 7),
    unit=st.sampled_from(["epoch", "step", "tokens"]),
    num_batches=st.integers(1, 10),
    front=st.sampled_from(FRONTS),
)
def test_random_schedule_equals_the_big_batch(
    plan: dict[int, int], first: int, unit: Any, num_batches: int, front: str
) -> None:
    scale = {"epoch": 1, "step": 1, "tokens": 40}[unit]
    stages = {0: first, **{scale * start: size for start, size in plan.items()}}
    sizes = RAGGED[:num_batches]
    windows = windows_of_plan(stages, unit, rows_of(sizes))
    ours = AccumulationSchedule(stages, unit=unit)
    module, fit = fitted(front, ours, loader=micro_batches(SEQUENCES, sizes))
    assert off(module, windows, rows_of(sizes)) <= 1e-8
    assert fit.global_step == number_of(windows)


# ---- how many steps ------------------------------------------------------------------

PLAN = {0: 4, 1: 2}  # over epochs of ten batches: 3 + 5 + 5 steps


class Asking(Mixed):
    """Asks how many steps there will be, where schedulers are made."""

    total: int | None = None
    estimated: Any = None

    def configure_optimizers(self) -> Any:
        self.total = schedule_of(self).total_steps(self.trainer)
        self.estimated = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


BATCHES = list(micro_batches(SEQUENCES))
STREAM: DataLoader[Any] = DataLoader(Stream(BATCHES), batch_size=None)


@pytest.mark.parametrize(
    ("length", "steps"),
    [
        ({"max_epochs": 3}, 19),
        ({"max_steps": 7}, 7),
        ({"max_steps": 7, "max_epochs": 3}, 7),
        ({"max_steps": 70, "max_epochs": 3}, 19),
        ({"max_steps": 17, "max_epochs": -1}, 17),
        ({"max_epochs": 3, "limit_train_batches": 7}, 9),
        ({"max_epochs": 3, "limit_train_batches": 0.55}, 7),
        ({"fast_dev_run": True}, 1),
        ({"fast_dev_run": 5}, 2),
        ({"loader": batches(4, drop_last=True), "max_epochs": 2}, 8),
        ({"loader": batches(4, drop_last=True), "max_steps": 7}, 7),
        ({"loader": STREAM, "max_steps": 9}, 9),
    ],
)
@pytest.mark.filterwarnings("ignore:accumulate_grad_batches=.. the epoch")
def test_total_steps_equals_global_step(length: dict[str, Any], steps: int) -> None:
    """pytorch-lightning#19684, kohya's sd-scripts#251: also where something else ends
    training, or the loader drops a batch. The control: Lightning's own estimate, which
    takes the first size for all."""
    module = Asking()
    ours = AccumulationSchedule({0: 4, 3: 3, 5: 1}, unit="step")
    _, fit = fitted("mixin", ours, module=module, **length)
    assert module.total == fit.global_step == steps
    if length == {"max_epochs": 3}:
        assert module.estimated == 9


@pytest.mark.parametrize(
    ("unit", "length", "text"),
    [
        ("epoch", {"max_epochs": -1}, "has 10 .* and -1 epochs. Set max_steps"),
        ("epoch", {"loader": STREAM}, "needs the length of training, and has inf bat"),
        ("tokens", {"max_epochs": 1}, "tokens_per_micro_batch="),
    ],
)
def test_total_steps_of_an_unknown_length_is_refused(
    unit: Any, length: Any, text: str
) -> None:
    with pytest.raises(TrainkitError, match=text):
        fitted(
            "mixin", AccumulationSchedule(PLAN, unit=unit), module=Asking(), **length
        )


# ---- two ranks -----------------------------------------------------------------------

DATA = ragged_sequences(36)
BATCH = 4  # five micro-batches an epoch on each rank
ON_RANKS: dict[str, Any] = {
    "epoch": {0: 1, 1: 3, 2: 2},
    "step": {0: 1, 2: 3, 5: 2},
    "tokens": {0: 1, 150: 3, 600: 2},
}
CASES = [("epoch", "mixin"), ("step", "callback"), ("tokens", "manual")]
OF_RANK = [[DATA[n::2][i : i + BATCH] for i in range(0, 18, BATCH)] for n in range(2)]
OF_BOTH = [one + other for one, other in zip(*OF_RANK, strict=True)]


def train(rank: int, world: int, unit: Any, front: str) -> tuple[Tensor, Any, int, int]:
    watch, ours = Watch(), AccumulationSchedule(ON_RANKS[unit], unit=unit)
    ddp: Any = {"strategy": "ddp", "devices": world, "use_distributed_sampler": False}
    data = rank_loader(DATA, BATCH, rank, world)
    module, fit = fitted(front, ours, watch, loader=data, **ddp)
    planned = ours.total_steps(fit, tokens_per_micro_batch=30.0)
    return weights(module), watch.stepped, fit.global_step, planned


def planned_steps(unit: Any, tokens: float) -> int:
    """The number of steps by the mean tokens of a micro-batch of both ranks."""
    stages = AccumulationSchedule(ON_RANKS[unit], unit=unit).stages
    return stages.num_steps(5, EPOCHS, tokens=tokens)


@pytest.fixture(scope="module")
def trained() -> Any:
    return run_cases(2, {case: (train, *case) for case in CASES})


@pytest.mark.parametrize(("unit", "front"), CASES)
def test_schedule_on_two_ranks_equals_one_process(
    trained: Any, unit: str, front: str
) -> None:
    """Their tokens differ, and they count those of both: all switch at one window. The
    control: the windows of ranks that count their own."""
    windows = windows_of_plan(ON_RANKS[unit], unit, OF_BOTH)
    for end, stepped, number, planned in raise_rank_errors(trained[unit, front]):
        assert number == number_of(windows)
        if front != "manual" or stepped:
            assert stepped == ends_of(windows, 5)
        assert off(end, windows, OF_BOTH) <= EXACT
        assert planned == planned_steps(unit, 60.0)
        assert (planned == planned_steps(unit, 30.0)) == (unit != "tokens")
        own = [windows_of_plan(ON_RANKS[unit], unit, rows) for rows in OF_RANK]
        assert (windows in own) == (unit != "tokens")
        assert (off(end, own[0], OF_BOTH) > NAIVE) == (unit == "tokens")
