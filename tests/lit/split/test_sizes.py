"""Memory that runs out, sizes that are found, and what is kept of them."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import TestCase

import pytest
import torch
from lightning_utilities.core import rank_zero
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import DataLoader

from tests.helpers import NAIVE, VOCABULARY, deviation, trainer, weights
from tests.lit.fronts import windows_of
from tests.lit.split.common import (
    AUTO,
    EXACT,
    FIXED,
    SEQUENCES,
    START,
    Split,
    fit,
    loader_batches,
    off,
)
from tests.lit.split.short_of_memory import (
    Cuts,
    Memory,
    Place,
    Short,
    out_of_memory,
    starting_at,
    states,
)
from tests.zoo.callbacks import Table
from tests.zoo.modules import Plain, Rows, hooked, on_front, plain_token_loss
from trainkit import MicroBatching, PerSample, TrainkitError, WindowMonitor
from trainkit.lit.split import auto
from trainkit.lit.split.auto import SizeSearch

pytestmark = [
    pytest.mark.filterwarnings("ignore:accumulation. an open window"),
    pytest.mark.filterwarnings("ignore:training_step has changed tensor, moving"),
    pytest.mark.filterwarnings("ignore:MicroBatching. the model sees its padding"),
]


@pytest.fixture(autouse=True)
def begins_with_whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nothing is searched."""
    monkeypatch.setattr(auto, "SizeSearch", starting_at(1000))


@pytest.fixture
def searches(begins_with_whole_batches: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "SizeSearch", SizeSearch)


def overwritten(self: Any, batch: Any) -> Tensor:
    """Writes into the batch that it gets, a part of which is needed again."""
    batch["ids"].add_(1).remainder_(VOCABULARY)
    return plain_token_loss(self.net, batch)


class Leaving(Short):
    """The control: once, the gradients of the attempt that failed count too."""

    def need(self, place: Place, batch: Any) -> None:
        memory: Any = self.memory  # which is not put back
        grads = [p.grad for p in self.parameters()]
        try:
            super().need(place, batch)
        except RuntimeError:
            memory.held = [grad.clone() for grad in grads if grad is not None]
            raise

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        memory: Any = self.memory
        held = vars(memory).pop("held", [])
        for parameter, grad in zip(self.parameters(), held, strict=False):
            assert parameter.grad is not None
            parameter.grad += grad


WRITING = hooked(Short, loss_of=overwritten)
AT_ONCE: dict[int, int] = {0: 60}  # and several times
LATER = {0: 400, 1: 120, 2: 40}  # in mid-training, twice
OTHERS = (3, 4, 11, 20)  # in other micro-batches than the largest


@pytest.mark.parametrize(
    ("kind", "memory", "window"),
    [
        (Short, Memory(AT_ONCE), 1),
        (Short, Memory(AT_ONCE, place="backward"), 2),
        (Short, Memory(LATER, place="transfer"), 1),
        (Short, Memory(LATER, place="backward"), 2),
        (Short, Memory(AT_ONCE, OTHERS), 1),
        (Short, Memory(AT_ONCE, OTHERS, place="log"), 2),
        (WRITING, Memory(AT_ONCE), 1),
        (Leaving, Memory({0: 400}, (2,)), 1),
    ],
)
def test_windows_that_ran_out_of_memory_equal_the_whole_batch(
    kind: Any, memory: Memory, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = replace(memory)
    if kind is Leaving:
        monkeypatch.setattr(auto, "SizeSearch", starting_at(60))
    found = off(kind(memory, cut=AUTO), kind(cut=None), window=window)
    assert memory.num_failures >= 1 + (kind is Short)
    assert found > NAIVE if kind is Leaving else found <= EXACT


@pytest.mark.parametrize(
    ("memory", "sizes", "window"),
    [
        (Memory({0: 40}, place="log"), (14, 17, 9), 1),  # several times
        (Memory({0: 150}, (4,), place="backward"), (20, 12, 8), 2),  # in a last one
    ],
)
def test_all_that_a_window_changes_equals_a_run_with_the_final_size(
    memory: Memory, sizes: Any, window: int
) -> None:
    """Weights, buffers, metrics, logs, counters and random numbers, bit by bit; another
    size is another run, which is the control."""
    memory, how = replace(memory), {"sizes": sizes, "window": window}
    found, size = states(AUTO, memory, **how)
    assert memory.num_failures > 0
    assert found == states(MicroBatching(tokens=size), **how)[0]
    assert found != states(MicroBatching(tokens=3 * size), **how)[0]


def test_a_single_sample_that_does_not_fit_is_refused_with_its_size() -> None:
    text = r"memory ran out with a single sample of 1\d tokens \(OutOfMemoryError\)"
    with pytest.raises(TrainkitError, match=text):
        fit(Short(Memory(fits={1: 12}), cut=AUTO))


@pytest.mark.parametrize(
    ("error", "place", "cut"),
    [
        (LookupError("mine"), "forward", AUTO),
        (RuntimeError("mat1 and mat2"), "backward", AUTO),
        (KeyboardInterrupt(), "backward", AUTO),
        (out_of_memory(), "forward", FIXED),  # the user has said the size
    ],
)
def test_another_error_goes_through_and_everything_is_as_before(
    error: BaseException, place: Place, cut: MicroBatching
) -> None:
    """The strategy object and the module have what they had; another fit is exact."""
    module = Short(Memory(calls=(2,), place=place, make=lambda _: error), cut=cut)
    fitted = trainer(1)
    before = set(vars(fitted.strategy))
    kind = SystemExit if isinstance(error, KeyboardInterrupt) else type(error)
    with pytest.raises(kind) as raised:
        fitted.fit(module, loader_batches((14, 9, 17)))
    if not isinstance(error, KeyboardInterrupt):
        assert raised.value is error
    added = set(vars(fitted.strategy)) - before
    assert not added & {"training_step", "backward", "batch_to_device"}
    assert "log" not in vars(module)
    module.memory = Memory()
    fit(fresh := Short(cut=cut))
    module.load_state_dict(Short().state_dict())
    fit(module)
    assert deviation(module, fresh, START) == 0


class Holding(Short):
    """Looks at the beginning of a pass whether what a failed one held is gone."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        memory: Any = self.memory  # which is not put back
        alive = getattr(memory, "alive", [])
        if memory.num_failures > len(alive):
            memory.alive = [*alive, memory.weakly() is not None]
        held = torch.ones(100, 100, requires_grad=True, dtype=torch.float64)
        memory.weakly = weakref.ref(held)
        loss = super().training_step(batch, batch_idx)
        return loss + 0 * (held * held).sum()


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_what_the_failed_frames_held_is_free_before_the_retry(place: Place) -> None:
    memory: Any = Memory(AT_ONCE, place=place)
    gc.disable()  # it must be seen to without the collector
    try:
        fit(Holding(memory, cut=AUTO))
    finally:
        gc.enable()
    assert memory.alive
    assert not any(memory.alive)


# ---- memory of a micro-batch ---------------------------------------------------------


class Saved:
    """Counts the bytes that autograd holds, and their greatest number."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def pack(self, tensor: Tensor) -> Any:
        size = tensor.numel() * tensor.element_size()
        self.count(size)
        held = _Held(tensor=tensor)
        weakref.finalize(held, self.count, -size)
        return held

    def count(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


class _Held(SimpleNamespace):
    """Unlike its base it can be referred to weakly."""


def returning_graphs(self: Any, batch: Any, batch_idx: int) -> Any:
    logits = self.net(batch["ids"])
    loss = self.loss(lambda ids: logits, batch)
    self.log("loss", loss)
    return {"loss": loss, "logits": logits, "mean": logits.mean()}


def losses_summed(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """One backward pass of the mean of all parts' losses: a control."""
    parts = zip(batch["ids"].split(4), batch["labels"].split(4), strict=True)
    losses = [self.loss_of({"ids": x, "labels": y}) for x, y in parts]
    return torch.stack(losses).mean()


def peak(module: Any, rows: int) -> int:
    module.proof = "off"  # its rehearsals save tensors too
    saved, ids = Saved(), torch.arange(rows * 12).view(rows, 12) % 13
    data = [{"ids": row, "labels": row} for row in ids]
    with saved_tensors_hooks(saved.pack, attrgetter("tensor")):
        fit(module, data=DataLoader(data, batch_size=rows), max_epochs=1)  # type: ignore[arg-type]
    assert saved.now == 0
    return saved.peak


@pytest.mark.parametrize(
    ("make", "is_split"),
    [
        (lambda: Split(), True),
        (lambda: hooked(Split, training_step=returning_graphs)(), True),
        (lambda: Split(cut=None), False),
        (lambda: hooked(Plain, training_step=losses_summed)(), False),
    ],
)
def test_saved_tensors_are_those_of_one_micro_batch(make: Any, is_split: bool) -> None:
    """Those of a whole batch, which are the control, grow with it."""
    alone = peak(make(), 4)
    for rows in (8, 16, 64):
        assert (peak(make(), rows) == alone) == is_split
    assert alone > 0


@pytest.mark.usefixtures("searches")
def test_it_begins_small_and_runs_the_largest_first() -> None:
    fit(Short(cut=AUTO), cuts := Cuts(), max_epochs=8)
    assert len(cuts.sizes[0]) > 1
    for sizes in cuts.sizes:
        assert sizes == sorted(sizes, reverse=True)


@pytest.mark.usefixtures("searches")
def test_a_search_that_goes_on_and_one_that_ends_are_exact() -> None:
    with TestCase().assertLogs(rank_zero.log, "INFO") as said:
        fitted = fit(module := Short(cut=AUTO), max_epochs=20)  # 60 windows
    fit(whole := Short(cut=None), max_epochs=20)
    assert deviation(module, whole, START) <= EXACT
    (line,) = [text for text in said.output if "MicroBatching" in text]
    limit = windows_of(fitted).micro_batch_size
    assert f"micro-batches of at most {limit} tokens" in line


def test_a_larger_loader_batch_later_is_cut_by_what_was_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    longest = max(len(x) for x, _ in SEQUENCES[:20])
    how: Any = {"sizes": (5, 5, 5, 5, 20), "max_epochs": 1}
    monkeypatch.setattr(auto, "SizeSearch", starting_at(5 * longest))
    module, cuts = Short(cut=AUTO), Cuts()
    assert off(module, Split(cut=None), cuts, **how) <= EXACT
    assert len(cuts.sizes[0]) == 1
    assert len(cuts.sizes[4]) > 1
    assert max(cuts.sizes[4]) <= 5 * longest


@pytest.mark.usefixtures("searches")
def test_the_size_is_logged_with_the_window_that_was_cut_so() -> None:
    module = Short(Memory(fits={0: 100, 2: 50}), cut=AUTO)
    table, cuts = Table(), Cuts()
    fit(module, WindowMonitor(1), cuts, logger=table, log_every_n_steps=1)
    rows = table.column("window/micro_batch_size")
    assert len(rows) == 6
    for size, ran in zip(rows, cuts.sizes, strict=True):
        assert ran[-1] <= size
    assert rows[2] <= 50


def test_images_are_cut_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches without lengths."""

    def training_step(self: Any, batch: Tensor, batch_idx: int) -> Any:
        if len(batch) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.rows.append(len(batch))
        return (self.net(batch) - batch[:, :1]).square().mean()

    data = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).double()
    ends, loader = [], DataLoader(data, batch_size=16)  # type: ignore[arg-type]
    for fits, cut, search in (
        (5, AUTO, SizeSearch),
        (5, AUTO, starting_at(1000)),
        (99, None, SizeSearch),
    ):
        monkeypatch.setattr(auto, "SizeSearch", search)
        kind = hooked(Rows, training_step=training_step, fits=fits, rows=[])
        module, _ = on_front("mixin", kind, strategy=PerSample(), cut=cut)
        fit(module, data=loader, max_epochs=3)
        assert max(kind.rows) <= fits  # type: ignore[attr-defined]
        ends.append(weights(module))
    for end in ends[:2]:
        assert deviation(end, ends[2], Rows()) <= EXACT


# ---- checkpoints ---------------------------------------------------------------------


def test_a_resumed_run_goes_on_with_the_size_and_equals_one_that_was_not_stopped(
    tmp_path: Path,
) -> None:
    path, fits = tmp_path / "found.ckpt", {0: 70}
    first = fit(Short(Memory(fits=fits), cut=AUTO), max_epochs=3)
    first.save_checkpoint(path)
    found = windows_of(first).micro_batch_size
    module, cuts = Short(Memory(fits=fits), cut=AUTO), Cuts()
    resumed = fit(module, cuts, max_epochs=5, ckpt_path=str(path))
    assert found is not None
    assert module.memory.num_failures == 0
    assert max(map(max, cuts.sizes)) <= found <= 70
    assert windows_of(resumed).micro_batch_size == found
    fit(whole := Short(cut=None), max_epochs=5)
    assert deviation(module, whole, START) <= EXACT


@pytest.mark.parametrize("start", [20, 1000])
def test_a_run_that_was_still_searching_begins_below_what_has_failed(
    start: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ran out is known, and searched again is what was not found."""
    path, cut = tmp_path / "searching.ckpt", AUTO
    monkeypatch.setattr(auto, "SizeSearch", starting_at(start))
    first = Short(Memory(fits={0: 150}), cut=cut)
    fit(first, max_epochs=2).save_checkpoint(path)
    assert (first.memory.num_failures > 0) == (start == 1000)
    module, cuts = Short(Memory(fits={0: 150}), cut=cut), Cuts()
    fit(module, cuts, max_epochs=3, ckpt_path=str(path))
    assert module.memory.num_failures == 0
    assert (max(cuts.sizes[0]) <= 20) == (start == 20)
    assert torch.load(path, weights_only=True)["trainkit_micro_batching"]


def test_another_fit_knows_nothing_of_the_last() -> None:
    failures = []
    module = Short(cut=AUTO)
    for _ in range(2):
        module.memory = Memory(fits={0: 70})
        fit(module)
        failures.append(module.memory.num_failures)
    assert failures[0] == failures[1] > 0
