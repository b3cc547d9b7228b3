"""Micro-batches reach the device once each, in time, and are weighed as they arrive."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import NAIVE, deviation, weights
from tests.lit.split.common import (
    CUTS,
    FIXED,
    SIZES,
    START,
    TRANSFER_HOOKS,
    Split,
    assert_as_whole,
    data_module,
    fit,
    on_the_way,
)
from tests.zoo.modules import Plain, Terms, hooked, on_front
from trainkit import AccumulationStrategy, MicroBatching, PerSample, PerToken
from trainkit.lit.split.arriving import moved

pytestmark = pytest.mark.filterwarnings("ignore:accumulation. an open window")
BEFORE, TO_DEVICE, AFTER = TRANSFER_HOOKS


# ---- what hooks change ---------------------------------------------------------------


def other_ids(module: Any, batch: Any) -> Any:
    return {**batch, "ids": (batch["ids"] + 1) % 13}


def masked(module: Any, batch: Any) -> Any:
    """As masked models do it on the device: some labels do not count, but the first."""
    is_masked = batch["ids"] % 3 == 0
    is_masked[:, 0] = False
    return {**batch, "labels": batch["labels"].masked_fill(is_masked, -100)}


def labelling(module: Any, batch: Any) -> Any:
    return {"ids": batch["ids"], "labels": batch["targets"]}


def hiding(module: Any, batch: Any) -> Any:
    return {"ids": batch["ids"], "targets": batch["labels"]}


def of_a_pack(self: Any, batch: Any, batch_idx: int) -> Any:
    return self.loss_of(batch[0])


PACKS = on_the_way(AFTER, lambda module, batch: [batch])
CASES: dict[str, Any] = {
    **{hook: {"hooks": on_the_way(hook, other_ids)} for hook in TRANSFER_HOOKS},
    "of a data module": {"owner": "data", "hooks": on_the_way(AFTER, other_ids)},
    "labels of a data module": {"owner": "data", "hooks": on_the_way(AFTER, masked)},
    "labels before the cut": {"hooks": on_the_way(BEFORE, masked)},
    "labels": {
        "hooks": on_the_way(TO_DEVICE, masked),
        "cut": CUTS["tokens"],
        "naive": NAIVE,
    },
    "labels, auto": {"hooks": on_the_way(AFTER, masked), "cut": CUTS["auto"]},
    "labels, windows of two": {"hooks": on_the_way(AFTER, masked), "window": 2},
    "labels made there": {
        "hooks": {**on_the_way(BEFORE, hiding), **on_the_way(AFTER, labelling)},
        "cut": MicroBatching(size=4, trim=False),
    },
}


@cache
def without_hooks(window: int) -> Tensor:
    fit(module := Split(cut=None), window=window)
    return weights(module)


@pytest.mark.parametrize("name", CASES)
def test_what_hooks_change_equals_whole_batches(name: str) -> None:
    """Also labels that they change, or make: each micro-batch weighs what it weighs as
    `training_step` gets it. Without the hook, a control, it is another training."""
    how = {"owner": "module", "cut": FIXED, **CASES[name]}
    hooks, owner = how.pop("hooks"), how.pop("owner")
    kind: Any = Split if owner == "data" else hooked(Split, **hooks)
    how["data"] = data_module(hooks) if owner == "data" else None
    ours = assert_as_whole(kind, how.pop("cut"), naive=how.pop("naive", 0), **how)
    untouched = without_hooks(how.get("window", 1))
    off = deviation(untouched, ours.lightning_module, START)
    assert off < 1e-10 if "made" in name else off > NAIVE


@pytest.mark.parametrize("front", ["callback", "terms", "another structure"])
def test_what_changes_there_weighs_so_on_any_front(front: str) -> None:
    hooks = on_the_way(AFTER, masked)
    if front == "another structure":
        kind, whole = hooked(Split, **PACKS, training_step=of_a_pack), Split(cut=None)
        module, ours = kind(strategy=PerToken("0.labels")), []
    elif front == "callback":
        module, ours = on_front(front, hooked(Plain, **hooks), cut=FIXED)
        whole: Any = hooked(Split, **hooks)(cut=None)
    else:  # each divided by a total of its own
        module, ours = hooked(Terms, **hooks)(cut=FIXED), []
        whole = hooked(Terms, **hooks, is_whole=True)(strategy=PerSample())
    fit(module, *ours)
    fit(whole)
    assert deviation(module, whole, START) < 1e-10


@dataclass(frozen=True)
class Counting(AccumulationStrategy):
    """Counts the rows that it is asked for, by their batches."""

    asked: list[int]

    def weight(self, batch: Any) -> Any:
        self.asked.append(len(batch["ids"]))
        return PerToken().weight(batch)


@pytest.mark.parametrize("has_hook", [True, False])
def test_each_micro_batch_travels_and_is_weighed_once(has_hook: bool) -> None:
    """And hooks run for the loader batch before the cut, for micro-batches after it."""
    seen: dict[str, list[int]] = {hook: [] for hook in TRANSFER_HOOKS}
    hooks: dict[str, Any] = {}
    for hook, sizes in seen.items() if has_hook else ():

        def count(module: Any, batch: Any, sizes: list[int] = sizes) -> Any:
            sizes.append(len(batch["ids"]))
            return batch

        hooks |= on_the_way(hook, count)
    module: Any = hooked(Split, **hooks)(
        strategy=(strategy := Counting([])), cut=MicroBatching(size=4, trim=False)
    )
    module.proof = "off"  # its rehearsals are counted too
    fit(module, max_epochs=1)
    assert sum(rows for rows in strategy.asked if rows <= 4) == sum(SIZES)
    assert seen[BEFORE] == list(SIZES) * has_hook
    for hook in (TO_DEVICE, AFTER):
        assert sum(seen[hook]) == sum(SIZES) * has_hook
        assert max(seen[hook], default=0) <= 4


# ---- streams -------------------------------------------------------------------------


class FakeCuda:
    """Writes down what streams and events are asked for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.on_stream = "computes"

    def Stream(self, device: Any) -> str:
        return "copies"

    @contextmanager
    def stream(self, name: str) -> Any:
        before, self.on_stream = self.on_stream, name
        yield
        self.on_stream = before

    def Event(self) -> FakeCuda:
        return self

    def record(self, stream: str) -> None:
        self.log.append(f"event on {stream}")

    def current_stream(self, device: Any) -> FakeCuda:
        return self

    def wait_event(self, event: FakeCuda) -> None:
        assert self.on_stream == "computes"
        self.log.append("wait")

    def move(self, batch: Any) -> Any:
        assert batch["x"].was_pinned
        self.log.append(f"move {batch['name']} on {self.on_stream}")
        return batch


BATCHES = [{"x": torch.full((2,), number), "name": number} for number in range(4)]


def test_each_is_moved_once_when_its_turn_comes_on_a_cpu() -> None:
    seen: list[int] = []

    def move(batch: Any) -> Any:
        seen.append(batch["name"])
        return batch

    for number, batch in enumerate(moved(BATCHES, move, torch.device("cpu"))):
        assert batch is BATCHES[number]
        assert seen == list(range(number + 1))


def test_on_a_gpu_the_next_one_is_under_way_while_one_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From pinned memory, on a stream of its own, for which the other one waits."""
    cuda = FakeCuda()
    for name in ("Stream", "stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))

    def pinned(tensor: Tensor) -> Tensor:
        (copy := tensor.clone()).was_pinned = True  # type: ignore[attr-defined]
        return copy

    monkeypatch.setattr(Tensor, "pin_memory", pinned)
    for batch in moved(BATCHES, cuda.move, torch.device("cuda")):
        cuda.log.append(f"compute {batch['name']}")
    one = ["move {} on copies", "event on copies"]
    expected = [text.format(0) for text in one]
    for number in range(4):
        expected.append("wait")
        expected += [text.format(number + 1) for text in one] if number < 3 else []
        expected.append(f"compute {number}")
    assert cuda.log == expected
