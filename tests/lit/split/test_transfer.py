"""Micro-batches reach the device once each, in order, and in time."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lit.split.common import SIZES, Split, fit
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.lit.split.arriving import moved

BATCHES = [{"x": torch.full((2,), number), "name": number} for number in range(4)]


def test_each_is_moved_once_when_its_turn_comes_on_a_cpu() -> None:
    seen: list[int] = []

    def move(batch: Any) -> Any:
        seen.append(batch["name"])
        return batch

    for number, batch in enumerate(moved(BATCHES, move, torch.device("cpu"))):
        assert batch is BATCHES[number]
        assert seen == list(range(number + 1))


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

    def Event(self) -> FakeEvent:
        return FakeEvent(self)

    def current_stream(self, device: Any) -> FakeStream:
        return FakeStream(self)

    def move(self, batch: Any) -> Any:
        assert batch["x"].was_pinned
        self.log.append(f"move {batch['name']} on {self.on_stream}")
        return batch


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def record(self, stream: str) -> None:
        self.cuda.log.append(f"event on {stream}")


class FakeStream:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def wait_event(self, event: FakeEvent) -> None:
        assert self.cuda.on_stream == "computes"
        self.cuda.log.append("wait")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in ("Stream", "stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))

    def pinned(tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        copy.was_pinned = True  # type: ignore[attr-defined]
        return copy

    monkeypatch.setattr(Tensor, "pin_memory", pinned)
    return fake


def test_on_a_gpu_the_next_one_is_under_way_while_one_computes(cuda: FakeCuda) -> None:
    """From pinned memory, on a stream of its own, for which the other one waits."""
    for batch in moved(BATCHES, cuda.move, torch.device("cuda")):
        cuda.log.append(f"compute {batch['name']}")
    one = ["move {} on copies", "event on copies"]
    expected = [text.format(0) for text in one]
    for number in range(4):
        expected.append("wait")
        expected += [text.format(number + 1) for text in one] if number < 3 else []
        expected.append(f"compute {number}")
    assert cuda.log == expected


class Hooks(Split):
    """Counts what Lightning calls on the way to the device."""

    def __init__(self) -> None:
        super().__init__(cut=MicroBatching(size=4))
        self.calls: list[tuple[str, int]] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append(("before", len(batch["ids"])))
        return batch

    def transfer_batch_to_device(
        self, batch: Any, device: Any, dataloader_idx: int
    ) -> Any:
        self.calls.append(("transfer", len(batch["ids"])))
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append(("after", len(batch["ids"])))
        return batch


def test_hooks_run_before_for_the_loader_batch_and_after_for_each_micro_batch() -> None:
    module = Hooks()
    fit(module, max_epochs=1)
    before = [size for name, size in module.calls if name == "before"]
    assert before == list(SIZES)
    for name in ("transfer", "after"):
        sizes = [size for kind, size in module.calls if kind == name]
        assert sum(sizes) == sum(SIZES)
        assert max(sizes) <= 4
