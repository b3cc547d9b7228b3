"""A step makes the host wait for nothing of trainkit's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.core.common import ByClass, class_weighted_loss, fresh_net, padded
from tests.helpers import ragged_sequences, token_loss
from trainkit import (
    AccumulationStrategy,
    Accumulator,
    NoiseMoments,
    PerSample,
    PerToken,
)

SAMPLES = ragged_sequences(12)
CUT = [padded(SAMPLES[:1]), padded(SAMPLES[1:5]), padded(SAMPLES[5:])]

READERS = ["item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy"]
WAITING = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::equal",
    "aten::is_nonzero",
}


class Waits(TorchDispatchMode):
    """Notes each operation whose result the host must wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.name().split(".")[0]
        by_mask = name == "aten::index" and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        if name in WAITING or by_mask:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    waits = Waits()
    for name in READERS:
        original = getattr(Tensor, name)

        def noted(
            self: Tensor, *args: Any, _of: Any = original, _name: str = name
        ) -> Any:
            waits.found.append(_name)
            return _of(self, *args)

        monkeypatch.setattr(Tensor, name, noted)
    return waits


def window(accumulator: Accumulator, loss: Any, slots: int = 0) -> None:
    net = fresh_net(torch.float32)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for batch in CUT:
        accumulator.backward(
            loss(net, batch, accumulator.strategy.loss_reduction), batch
        )
    accumulator.finish(optimizer, slots=slots)
    optimizer.step()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("make", "loss"),
    [(PerToken, token_loss), (PerSample, token_loss), (ByClass, class_weighted_loss)],
)
def test_step_waits_for_nothing(
    make: Any, loss: Any, reduction: Any, waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchtitan#4099: no `.item()` on the path of a step. The flags are read when
    they have arrived, as a reading on a GPU is."""
    strategy: AccumulationStrategy = make(loss_reduction=reduction)
    accumulator = Accumulator(strategy)
    monkeypatch.setattr(accumulator.watch, "read_arrived", lambda: None)
    with waits:
        for _ in range(3):
            window(accumulator, loss, slots=4)
    assert waits.found == []


def test_a_measured_window_waits_for_nothing(
    waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = fresh_net(torch.float32)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    accumulator = Accumulator(PerToken())
    moments = NoiseMoments(accumulator, optimizer)
    monkeypatch.setattr(accumulator.watch, "read_arrived", lambda: None)
    with waits:
        for _ in range(6):
            moments.watch()
            for batch in CUT:
                accumulator.backward(token_loss(net, batch), batch)
            moments.add(accumulator.finish(optimizer), samples=12)
            optimizer.step()
    assert waits.found == []
    assert moments.estimate() is not None


def test_counting_waits_finds_one(waits: Waits) -> None:
    """The control."""
    with waits:
        torch.ones(()).item()
        bool(torch.ones(()))
        torch.ones(3)[torch.ones(3) > 0]
    assert {"item", "__bool__", "aten::index"} <= set(waits.found)


def test_late_reading_is_one_copy_for_each_window(waits: Waits) -> None:
    accumulator = Accumulator(PerToken())
    with waits:
        for _ in range(4):
            window(accumulator, token_loss)
    assert waits.found == ["tolist"] * 3  # the last one is still waiting
