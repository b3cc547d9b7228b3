"""Micro-batches reach the device once each, in time, and weigh what was told before."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from tests.helpers import NAIVE, deviation, trainer
from tests.lit.split.common import (
    AUTO,
    FIXED,
    SEQUENCES,
    SIZES,
    START,
    TRANSFER_HOOKS,
    Split,
    assert_as_whole,
    data_module,
    fit,
    loader_batches,
    on_the_way,
)
from tests.zoo import Plain, hooked, pad_and_mask
from trainkit import (
    AccumulationCallback,
    AccumulationStrategy,
    MicroBatching,
    PerToken,
    TrainkitError,
)
from trainkit.core.checks import LateReading
from trainkit.lit.split.arriving import moved

pytestmark = pytest.mark.filterwarnings("ignore:accumulation. an open window")
BEFORE, *AFTER = TRANSFER_HOOKS


# ---- what hooks change ---------------------------------------------------------------


def other_ids(module: Any, batch: Any) -> Any:
    return {**batch, "ids": (batch["ids"] + 1) % 13}


@pytest.mark.parametrize("owner", ["module", "data module"])
@pytest.mark.parametrize("hook", TRANSFER_HOOKS)
def test_hooks_change_batches_as_without_the_cut(hook: str, owner: str) -> None:
    hooks = on_the_way(hook, other_ids)
    if owner == "module":
        ours = assert_as_whole(hooked(Split, **hooks))
    else:
        ours = assert_as_whole(data=data_module(hooks))
    fit(untouched := Split(cut=None))
    assert deviation(untouched, ours.lightning_module, START) > NAIVE


def of_a_pack(self: Any, batch: Any, batch_idx: int) -> Any:
    return self.loss_of(batch[0])


def test_what_becomes_something_else_is_not_compared() -> None:
    hooks = on_the_way(AFTER[1], lambda module, batch: [batch])
    fit(module := hooked(Split, training_step=of_a_pack, **hooks)())
    fit(whole := Split(cut=None))
    assert deviation(module, whole, START) <= 1e-10


# ---- what they make of its weight ----------------------------------------------------


def masked(module: Any, batch: Any) -> Any:
    """As masked models do: from a step on, long rows lose more labels than short ones.
    A module says from which; a data module's is 1."""
    labels = batch["labels"].clone()
    labels[:, 2:] = -100
    begins = getattr(module, "begins", 1)
    begun = module.trainer.training and module.trainer.global_step >= begins
    return {**batch, "labels": labels} if begun else batch


def labelling(module: Any, batch: Any) -> Any:
    return {"ids": batch["ids"], "labels": batch["targets"]}


def hiding(module: Any, batch: Any) -> Any:
    return {"ids": batch["ids"], "targets": batch["labels"]}


def text(step: int) -> str:
    return (
        rf"PerToken: at optimizer step {step} .counted from 0. a micro-batch weighed "
        r"\d+ before it went to the device, and weighs \d+ after .* on_before_batch_tr"
    )


MASKING = {hook: hooked(Split, **on_the_way(hook, masked)) for hook in TRANSFER_HOOKS}
LATE_LABELS = hooked(
    Split, **on_the_way(BEFORE, hiding), **on_the_way(AFTER[1], labelling)
)


@pytest.mark.parametrize(
    ("make", "begins", "match"),
    [
        *[
            (lambda h=hook, c=cut: MASKING[h](cut=c), begins, text(begins))
            for hook in AFTER
            for cut in (FIXED, AUTO)
            for begins in (0, 1)
        ],
        (lambda: hooked(Plain, **on_the_way(AFTER[1], masked))(), 1, text(1)),
        (lambda: data_module(on_the_way(AFTER[1], masked)), 1, text(1)),
        (lambda: LATE_LABELS(), 0, "path 'labels'.*targets"),
    ],
)
def test_labels_that_change_on_the_way_are_refused(
    make: Any, begins: int, match: str
) -> None:
    """They were weighed on the host: the division would be wrong in silence."""
    made, data, ours = make(), None, []
    made.begins = begins
    if isinstance(made, pl.LightningDataModule):
        made, data = Split(), made
    if not isinstance(made, Split):
        ours = [AccumulationCallback(PerToken(), micro_batching=FIXED)]
    with pytest.raises(TrainkitError, match=match):
        fit(made, *ours, data=data)


def test_masked_before_the_cut_equals_whole_batches_and_after_it_would_not() -> None:
    """The control: a strategy that hides what has changed, from the comparison too."""
    ours = assert_as_whole(hooked(MASKING[BEFORE], begins=1))
    late = hooked(MASKING[AFTER[1]], begins=1)
    fit(module := late(strategy=PerToken(mask="attention_mask")))
    assert deviation(module, ours.lightning_module, START) > NAIVE


@dataclass(frozen=True)
class Counting(AccumulationStrategy):
    """Counts how often it is asked."""

    asked: list[int]

    def weight(self, batch: Any) -> Any:
        self.asked.append(len(batch["ids"]))
        return PerToken().weight(batch)


@pytest.mark.parametrize("has_hook", [True, False])
def test_nothing_is_weighed_twice_where_nobody_has_a_hook(has_hook: bool) -> None:
    kind = hooked(MASKING[AFTER[1]], begins=1000) if has_hook else Split
    fit(kind(strategy=(strategy := Counting([]))), max_epochs=1)
    of_parts = [rows for rows in strategy.asked if rows <= 4]
    assert sum(of_parts) == sum(SIZES) * (1 + has_hook)


@pytest.mark.parametrize("is_count", [True, False])
def test_a_mask_may_be_rounded_on_the_way_and_a_count_may_not(is_count: bool) -> None:
    """One label of three hundred, or what a cast to half precision leaves of 0.1."""

    def rounded(module: Any, batch: Any) -> Any:
        labels = batch["labels"].clone()
        labels[0, 0] = -100
        changed = {"labels": labels} if is_count else {"w": batch["w"].bfloat16()}
        return {**batch, **changed}

    def collate(samples: Any) -> Any:
        batch = pad_and_mask(samples * 40)
        return {**batch, "w": 0.1 * batch["attention_mask"].double()}

    data: Any = torch.utils.data.DataLoader(SEQUENCES, 8, collate_fn=collate)  # type: ignore[arg-type]
    strategy = PerToken() if is_count else PerToken(mask="w")
    kind = hooked(Split, **on_the_way(AFTER[1], rounded))
    module = kind(strategy=strategy, cut=MicroBatching(size=160))
    if is_count:
        with pytest.raises(TrainkitError, match=text(0)):
            fit(module, data=data)
    else:
        fit(module, data=data)


# ---- what is on a device is read later -----------------------------------------------


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose numbers have not arrived when they are first asked for."""

    def arrived(reading: Any) -> bool:
        was_asked = hasattr(reading, "was_asked")
        reading.was_asked = True
        return was_asked

    monkeypatch.setattr(LateReading, "arrived", property(arrived))


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize(
    ("begins", "checks"),
    [(1, "late"), (3, "late"), (5, "late"), (0, "late"), (2, "now")],
)
def test_what_is_on_a_device_is_read_in_a_later_window(
    begins: int, checks: Any
) -> None:
    """Or where the epoch ends; the step has been taken by then, which is said. In the
    first window, and with `checks="now"`, nothing is taken."""
    kind = hooked(MASKING[AFTER[1]], begins=begins, checks=checks)
    module, fitted = kind(), trainer()
    with pytest.raises(TrainkitError, match=text(begins)) as raised:
        fitted.fit(module, loader_batches())
    is_late = begins > 0 and checks == "late"
    assert begins + is_late <= fitted.global_step <= begins + 2 * is_late
    assert ("The step was taken with it; resume" in str(raised.value)) == is_late


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("window", [1, 2])
def test_what_weighs_the_same_on_a_device_trains(window: int) -> None:
    kind = hooked(MASKING[AFTER[1]], begins=1000)
    fit(module := kind(), window=window)
    fit(untouched := Split(), window=window)
    assert deviation(module, untouched, START) <= 1e-12


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


def test_hooks_run_before_for_the_loader_batch_and_after_for_each_micro_batch() -> None:
    calls: dict[str, list[int]] = {hook: [] for hook in TRANSFER_HOOKS}
    hooks = {}
    for hook, sizes in calls.items():

        def count(module: Any, batch: Any, sizes: list[int] = sizes) -> Any:
            sizes.append(len(batch["ids"]))
            return batch

        hooks |= on_the_way(hook, count)
    cut = MicroBatching(size=4, trim=False)  # no rehearsal comes before
    fit(hooked(Split, **hooks)(cut=cut), max_epochs=1)
    assert calls[BEFORE] == list(SIZES)
    for hook in AFTER:
        assert sum(calls[hook]) == sum(SIZES)
        assert max(calls[hook]) <= 4
