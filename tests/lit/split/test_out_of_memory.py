"""A window in which memory ran out is run again, and nothing tells that it was."""

from __future__ import annotations

import gc
import weakref
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

from tests.helpers import VOCABULARY, deviation, weights
from tests.lit.split.common import START, fit
from tests.lit.split.short_of_memory import (
    Memory,
    Place,
    Rich,
    Short,
    States,
    out_of_memory,
    seeded,
)
from trainkit.core.split import search
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.split.search import SizeSearch
from trainkit.errors import TrainkitError

pytestmark = [
    pytest.mark.filterwarnings("ignore:accumulation. an open window"),
    pytest.mark.filterwarnings("ignore:training_step has changed tensor, moving"),
]

AUTO = MicroBatching("auto", start=1000)  # the whole batch, and no search
EXACT = 1e-9


@pytest.fixture
def first_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other size is tried, so that two runs cut alike."""
    monkeypatch.setattr(search, "SHARE", 1)
    monkeypatch.setattr(search, "FASTER", 1e9)


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The window and the size of each failure."""
    seen: list[tuple[int, int]] = []
    failed, passed = SizeSearch.failed, SizeSearch.passed
    count = iter(range(1000))
    window = [next(count)]

    def noted(self: SizeSearch, size: int) -> None:
        seen.append((window[0], size))
        failed(self, size)

    def counted(self: SizeSearch, *args: Any, **kwargs: Any) -> None:
        window[0] = next(count)
        passed(self, *args, **kwargs)

    monkeypatch.setattr(SizeSearch, "failed", noted)
    monkeypatch.setattr(SizeSearch, "passed", counted)
    return seen


def told(failures: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next run know before each window what ran out in it."""
    begin, failed = SizeSearch.begin, SizeSearch.failed
    passed, window, left = SizeSearch.passed, [0], list(failures)

    def knowing(self: SizeSearch, whole: int) -> None:
        begin(self, whole)
        while left and left[0][0] == window[0]:
            failed(self, left.pop(0)[1])

    def counted(self: SizeSearch, *args: Any, **kwargs: Any) -> None:
        window[0] += 1
        passed(self, *args, **kwargs)

    monkeypatch.setattr(SizeSearch, "begin", knowing)
    monkeypatch.setattr(SizeSearch, "passed", counted)


@cache
def reference(window: int = 1) -> Tensor:
    """Where a run ends whose loader batches are one micro-batch each."""
    module = Short(cut=None)
    fit(module, window=window)
    return weights(module)


# ---- the step is the exact one -------------------------------------------------------


AT_ONCE: dict[int, int] = {0: 60}  # and several times
LATER = {0: 400, 1: 120, 2: 40}  # in mid-training, twice
OTHERS = (3, 4, 11, 20)  # in other micro-batches than the largest


@pytest.mark.parametrize(
    ("fits", "calls", "place", "window"),
    [
        (AT_ONCE, (), "forward", 1),
        (AT_ONCE, (), "backward", 2),
        (LATER, (), "transfer", 1),
        (LATER, (), "backward", 2),
        (AT_ONCE, OTHERS, "forward", 1),
        (AT_ONCE, OTHERS, "log", 2),
    ],
)
def test_windows_that_ran_out_of_memory_equal_the_whole_batch(
    place: Place, fits: dict[int, int], calls: tuple[int, ...], window: int
) -> None:
    memory = Memory(fits=fits, calls=calls, place=place)
    module = Short(memory, cut=AUTO)
    fit(module, window=window)
    assert memory.num_failures >= 2
    assert deviation(module, reference(window), START) <= EXACT


def test_a_window_that_was_run_again_without_forgetting_would_be_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control: gradients that are left in place are counted twice."""
    auto = "trainkit.lit.split.auto"
    monkeypatch.setattr(f"{auto}.KeptGradients.restore", lambda self: None)
    module = Short(Memory(calls=(2,)), cut=MicroBatching(start=60))
    fit(module)
    assert module.memory.num_failures == 1
    assert deviation(module, reference(), START) > 1e-2


class Measured(Short):
    """Logs what a metric object says of the step."""

    def __init__(self, memory: Memory | None = None, **how: Any) -> None:
        super().__init__(memory, **how)
        self.accuracy = MulticlassAccuracy(VOCABULARY, average="micro")

    def loss_of(self, batch: Any) -> Tensor:
        labels = batch["labels"].flatten()
        logits = self.net(batch["ids"]).flatten(0, 1)
        keep = labels != -100
        accuracy = self.accuracy(logits[keep].detach(), labels[keep])
        self.log("accuracy", accuracy, on_step=True, on_epoch=False)
        return super().loss_of(batch)


def test_metrics_of_a_step_leave_out_the_attempt_that_failed() -> None:
    seen, wanted = States(), States()
    module = Measured(Memory(calls=(2,)), cut=MicroBatching(start=60))
    fit(Measured(cut=None), wanted)
    fit(module, seen)
    assert module.memory.num_failures == 1
    found = [logged["accuracy"] for _, logged in seen.seen[:-1]]
    right = [logged["accuracy"] for _, logged in wanted.seen[:-1]]
    assert found == pytest.approx(right)


class Overwriting(Short):
    """Writes into the batch that it gets, a part of which is needed again."""

    def loss_of(self, batch: Any) -> Tensor:
        batch["ids"].add_(1).remainder_(VOCABULARY)
        return super().loss_of(batch)


@pytest.mark.parametrize("copies", [True, False])
def test_what_a_step_writes_into_its_batch_is_not_seen_by_the_next_attempt(
    copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not copies:  # the control
        transfer = "trainkit.lit.split.arriving.Transfer"
        monkeypatch.setattr(f"{transfer}._copied", lambda self, tensor: tensor)
    module = Overwriting(Memory(fits={0: 60}), cut=AUTO)
    whole = Overwriting(cut=None)
    fit(module)
    fit(whole)
    assert module.memory.num_failures >= 1
    assert (deviation(module, whole, START) <= EXACT) is copies


# ---- all else is as if it had not happened -------------------------------------------

SCHEDULES = {
    "at once": ({0: 90}, ()),
    "in mid-training": ({0: 400, 1: 90}, ()),
    "several times": ({0: 300, 1: 150, 3: 40}, ()),
    "in a last micro-batch": ({0: 150}, (4,)),
}


@pytest.mark.filterwarnings("ignore:MicroBatching. the model sees its padding")
@pytest.mark.usefixtures("first_that_fits")
@pytest.mark.parametrize(
    ("schedule", "place", "window"),
    [
        ("at once", "log", 1),
        ("in mid-training", "transfer", 1),
        ("several times", "backward", 2),
        ("several times", "forward", 1),
        ("in a last micro-batch", "transfer", 2),
    ],
)
def test_all_that_a_window_changes_equals_a_run_with_the_final_sizes(
    schedule: str,
    place: Place,
    window: int,
    failures: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights, buffers, metrics, logs, counters and random numbers, bit by bit."""
    fits, calls = SCHEDULES[schedule]
    seeded()
    memory, states = Memory(fits=fits, calls=calls, place=place), States()
    fit(Rich(memory, cut=AUTO), states, window=window)
    assert len(failures) == memory.num_failures > 0
    told(list(failures), monkeypatch)
    seeded()
    expected = States()
    fit(Rich(cut=AUTO), expected, window=window)
    for mine, theirs in zip(states.seen, expected.seen, strict=True):
        assert mine == theirs


@pytest.mark.filterwarnings("ignore:MicroBatching. the model sees its padding")
@pytest.mark.usefixtures("first_that_fits")
@pytest.mark.parametrize("left_out", ["_keep_tensor", "_keep_entries"])
def test_a_snapshot_without_a_part_is_noticed(
    left_out: str, failures: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control for the test above."""
    states, expected = States(), States()
    seeded()
    with monkeypatch.context() as less:
        kept = "trainkit.lit.aside.Kept"
        less.setattr(f"{kept}.{left_out}", lambda *_, **__: None)
        fit(Rich(Memory(fits={0: 90}), cut=AUTO), states)
    told(list(failures), monkeypatch)
    seeded()
    fit(Rich(cut=AUTO), expected)
    assert states.seen != expected.seen


# ---- what cannot be helped -----------------------------------------------------------


def test_a_single_sample_that_does_not_fit_is_refused_with_its_size() -> None:
    module = Short(Memory(fits={1: 12}), cut=AUTO)
    text = r"memory ran out with a single sample of 1\d tokens \(OutOfMemoryError\)"
    with pytest.raises(TrainkitError, match=text):
        fit(module)


class Other(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "place"),
    [
        (Other("mine"), "forward"),
        (RuntimeError("mat1 and mat2"), "forward"),
        (RuntimeError("mat1 and mat2"), "backward"),
        (KeyboardInterrupt(), "backward"),
    ],
)
def test_another_error_goes_through_and_nothing_stays_patched(
    error: BaseException, place: Place
) -> None:
    module = Short(Memory(calls=(5,), place=place, make=lambda _: error), cut=AUTO)
    kind = SystemExit if isinstance(error, KeyboardInterrupt) else type(error)
    with pytest.raises(kind) as raised:
        fit(module)
    if not isinstance(error, KeyboardInterrupt):
        assert raised.value is error
    strategy = module.trainer.strategy
    assert not {"training_step", "backward", "batch_to_device"} & vars(strategy).keys()
    assert "log" not in vars(module)
    module.memory = Memory()
    fit(module)  # and it can be trained


def test_memory_of_a_size_that_was_said_is_the_users() -> None:
    error = out_of_memory()
    memory = Memory(calls=(3,), make=lambda _: error)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        fit(Short(memory))
    assert raised.value is error


# ---- memory comes free before the retry ----------------------------------------------


class Watch:
    """What a failing pass held, and whether it was there in the next one."""

    def __init__(self) -> None:
        self.alive: list[bool] = []
        self.num_known = 0
        self.held: weakref.ref[Any] = weakref.ref(self)  # such objects are not put back


class Holding(Short):
    """Looks at the beginning of a pass whether what a failed one held is gone."""

    def __init__(self, place: Place) -> None:
        super().__init__(Memory(fits={0: 60}, place=place), cut=AUTO)
        self.watch = Watch()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        watch, num_failures = self.watch, self.memory.num_failures
        if num_failures > watch.num_known:
            watch.num_known = num_failures
            watch.alive.append(watch.held() is not None)
        held = torch.ones(100, 100, requires_grad=True, dtype=torch.float64)
        watch.held = weakref.ref(held)
        loss = super().training_step(batch, batch_idx)
        return loss + 0 * (held * held).sum()


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_what_the_failed_frames_held_is_free_before_the_retry(place: Place) -> None:
    module = Holding(place)
    gc.disable()  # release() must see to it itself
    try:
        fit(module)
    finally:
        gc.enable()
    assert module.watch.alive
    assert not any(module.watch.alive)
