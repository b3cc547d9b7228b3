"""`ResumableStream` in a loop of one's own: what it saves, hands on and refuses."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader

from tests.helpers import raise_rank_errors, run_ranks, start_gloo, trainer
from tests.zoo.modules import Stream
from trainkit import ResumableStream, TrainkitError


class Live:
    """Its state is a live dict, and it knows how it was told the epoch."""

    def __init__(self, number: int = 5) -> None:
        self.number, self.place = number, {"row": 0}
        self.epochs: list[int] = []

    def __iter__(self) -> Iterator[int]:
        while self.place["row"] < self.number:
            self.place["row"] += 1
            yield 10 * self.place["row"]
        self.place["row"] = 0

    def state_dict(self) -> dict[str, int]:
        return self.place

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Sized(Live):
    batch_size = 10

    def __len__(self) -> int:
        return self.number


@pytest.mark.parametrize("kind", [Live, Sized])
@pytest.mark.parametrize("stops", [(0, 2), (1, 1, 1), (5,), (4, 1), (3, 0)])
def test_loop_resumes_after_the_batch_that_next_returned(kind: Any, stops: Any) -> None:
    """In chains of stops, to the end of the pass and through the next one."""
    read: list[int] = []
    state: Any = None
    for stop in stops:
        stream = ResumableStream(kind())
        if state is not None:
            stream.load_state_dict(state)
        batches = iter(stream)
        read += [next(batches) for _ in range(stop)]
        state = copy.deepcopy(stream.state_dict())
        list(batches)  # the loader goes on, and what was saved does not
    last = ResumableStream(kind())
    last.load_state_dict(state)
    assert last.state_dict() == state  # before anything is read from it
    assert read + list(last) == [10, 20, 30, 40, 50]
    assert list(last) == [10, 20, 30, 40, 50]


def test_batch_that_waits_is_not_counted() -> None:
    """What a callback says of the last batch; at the end of a pass none waits."""
    stream = ResumableStream(Live())
    batches = iter(stream)
    given = [next(batches), next(batches)]
    waiting = [given[-1]]
    stream.is_waiting = lambda batch: any(each is batch for each in waiting)
    assert stream.state_dict()["places"] == [{"row": 1}]
    assert list(batches) == [30, 40, 50]
    assert stream.state_dict()["places"] == [{"row": 0}]


def test_it_hands_on_what_the_loader_has() -> None:
    loader = Sized()
    stream = ResumableStream(loader)
    assert (len(stream), stream.batch_size) == (5, 10)
    stream.sampler.set_epoch(3)
    assert loader.epochs == [3]
    again = ResumableStream(Sized())
    again.load_state_dict(stream.state_dict())
    assert again.epochs == [3]  # before anything is read: it may decide the order
    with pytest.raises(TypeError):
        len(ResumableStream(Live()))
    with pytest.raises(AttributeError):
        _ = ResumableStream(Live()).batch_size


class AsLitData:
    """litData's loader where it is unlike others: it resumes until a pass has ended,
    and a resumed one saves the epoch that its dataset was told before."""

    __module__ = "litdata.streaming"

    def __init__(self) -> None:
        self.dataset, self.restore = self, False
        self.current_epoch, self.told, self.row = 0, 1, 0
        self.loaded: dict[str, int] | None = None

    def __iter__(self) -> Iterator[int]:
        if not self.restore:
            self.current_epoch += 1
            self.row, self.loaded = 0, None
        self.set_epoch(self.current_epoch)
        begun = self.loaded or {"row": 0, "epoch": self.told}
        self.row, epoch = begun["row"], begun["epoch"]
        while self.row < 5:
            self.row += 1
            yield 10 * epoch + self.row
        self.restore = False

    def set_epoch(self, epoch: int) -> None:
        if self.loaded is None:
            self.told = epoch

    def state_dict(self) -> dict[str, int]:
        now = {"row": self.row, "epoch": self.told, "current_epoch": self.current_epoch}
        if self.loaded is None:
            return now
        self.loaded.update(now)
        return self.loaded

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.current_epoch, self.row = state["current_epoch"], state["row"]
        self.loaded, self.restore = state, 0 < self.row < 5


def test_litdata_resumes_twice_and_then_begins_anew() -> None:
    """Its passes are left after their last batch, as Lightning leaves them."""
    read: list[int] = []
    state: Any = None
    for number in (7, 1, 7):
        stream = ResumableStream(AsLitData())
        if state is not None:
            stream.load_state_dict(state)
        batches = iter(stream)
        for at in range(len(read), len(read) + number):
            if read and at % 5 == 0:
                batches = iter(stream)
                stream.set_epoch(at // 5)  # as Lightning counts
            read.append(next(batches))
        state = copy.deepcopy(stream.state_dict())
    assert read == [10 * epoch + row for epoch in (1, 2, 3) for row in range(1, 6)]


@pytest.mark.parametrize("part", ["sampler", "dataset"])
def test_epoch_reaches_the_part_that_takes_it(part: str) -> None:
    owner, loader = Live(), Live()
    loader.set_epoch = None  # type: ignore[assignment,method-assign]
    setattr(loader, part, owner)
    ResumableStream(loader).set_epoch(2)
    assert owner.epochs == [2]


def test_lightning_can_end_the_workers() -> None:
    loader = Live()
    stream = ResumableStream(loader)
    stream._iterator = None
    assert not hasattr(loader, "_iterator")
    loader._iterator = "workers"  # type: ignore[attr-defined]
    assert stream._iterator == "workers"
    stream._iterator = None
    assert loader._iterator is None  # type: ignore[attr-defined]


def test_lightning_can_validate_with_it() -> None:
    """It asks a loader that has a sampler for its batch sampler."""

    seen: list[int] = []

    class Sees(pl.LightningModule):
        def validation_step(self, batch: int, batch_idx: int) -> None:
            seen.append(batch)

    trainer().validate(Sees(), ResumableStream(Live()), verbose=False)
    assert seen == [10, 20, 30, 40, 50]


# ---- refusals ------------------------------------------------------------------------


def test_loader_without_a_state_is_refused_when_made() -> None:
    text = "received DataLoader without state_dict and load_state_dict. For rows by"
    with pytest.raises(TrainkitError, match=f"ResumableStream loader: .*{text}"):
        ResumableStream(DataLoader([1, 2]))  # type: ignore[arg-type]


def test_pass_that_another_has_overtaken_is_refused() -> None:
    stream = ResumableStream(Live())
    first = iter(stream)
    next(first)
    next(iter(stream))
    text = "one pass at a time, and another has begun"
    with pytest.raises(TrainkitError, match=text):
        next(first)
    with pytest.raises(TypeError, match="one pass at a time"):
        copy.copy(stream)


def test_foreign_state_is_refused() -> None:
    with pytest.raises(TrainkitError, match="a state that a ResumableStream has saved"):
        ResumableStream(Live()).load_state_dict({"row": 1})
    with pytest.raises(TrainkitError, match="was 2 when the .* written and is 1 now"):
        ResumableStream(Live()).load_state_dict({"epoch": None, "places": [{}, {}]})
    with pytest.raises(TrainkitError, match="that of rank 0 is not in the checkpoint"):
        ResumableStream(Live()).load_state_dict({"epoch": None, "places": [None]})


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_stream_without_a_state_of_its_own_is_said_once() -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> ResumableStream:
        return ResumableStream(torchdata.StatefulDataLoader(Stream(range(20)), None))

    whole, stream = list(make()), make()
    batches = iter(stream)
    for _ in range(3):
        next(batches)
    with pytest.warns(
        UserWarning, match="the Stream has no state_dict .* twice within"
    ):
        state = stream.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stream.state_dict()
    again = make()
    again.load_state_dict(state)
    batches = iter(again)
    assert [next(batches) for _ in range(3)] == whole[3:6]  # once it does resume
    with pytest.warns(UserWarning, match="the Stream has no state_dict"):
        state = again.state_dict()
    twice = make()
    twice.load_state_dict(state)
    assert list(twice) != whole[6:]  # as it was said


# ---- ranks ---------------------------------------------------------------------------


def _on_two_ranks(rank: int, size: int) -> Any:
    start_gloo()
    stream = ResumableStream(Live(5 + rank))
    batches = iter(stream)
    for _ in range(1 + rank):  # the ranks stand at places of their own
        next(batches)
    state = stream.state_dict()
    again = ResumableStream(Live(5 + rank))
    again.load_state_dict(state)
    rows: Any = DataLoader([1, 2])  # type: ignore[arg-type]
    rows.state_dict = rows.load_state_dict = lambda: {}
    return list(again), error_of(lambda: iter(ResumableStream(rows)))


def error_of(run: Any) -> str:
    try:
        run()
    except TrainkitError as refused:
        return str(refused)
    return ""


def _after_an_error(rank: int, size: int) -> Any:
    """One rank saves, and the others do not come."""
    start_gloo()
    stream = ResumableStream(Live())
    stream.is_alone = lambda: True
    next(iter(stream))
    state = stream.state_dict() if rank == 0 else {"epoch": None, "places": [{}, None]}
    again = ResumableStream(Live())
    return state["places"], error_of(lambda: again.load_state_dict(state))


def test_rank_that_saves_alone_waits_for_none_and_others_are_refused() -> None:
    (places, none), (_, error) = raise_rank_errors(run_ranks(_after_an_error, 2))
    assert places[0] is not None
    assert places[1] is None
    assert none == ""
    assert "that of rank 1 is not in the checkpoint" in error


def test_each_rank_resumes_at_its_own_place() -> None:
    (first, error), (second, _) = raise_rank_errors(run_ranks(_on_two_ranks, 2))
    assert first == [20, 30, 40, 50]
    assert second == [30, 40, 50, 60]
    assert re.search("received a SequentialSampler: every rank would read all", error)
