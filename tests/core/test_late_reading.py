"""Device values reach the host late, and in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.core.common import GivenWeight
from trainkit import Accumulator, TrainkitError
from trainkit.core import checks
from trainkit.core.checks import LateReading, Watch
from trainkit.core.window import (
    BARE_LOSS,
    COUNT,
    DIVISOR,
    LARGEST,
    LOSS,
    NUM_COLUMNS,
    SMALLEST,
    WEIGHT,
)


def one_row(loss: float) -> torch.Tensor:
    """The table of a window of one micro-batch that weighs 1."""
    row = torch.zeros(1, NUM_COLUMNS)
    row[:, [WEIGHT, DIVISOR, COUNT, SMALLEST, LARGEST]] = 1.0
    row[:, [LOSS, BARE_LOSS]] = loss
    return row


GOOD, BAD = one_row(2.0), one_row(torch.nan)


class FakeEvent:
    """A CUDA event that is reached when the test says so."""

    reached = False

    def record(self, stream: Any) -> None: ...

    def query(self) -> bool:
        return FakeEvent.reached

    def synchronize(self) -> None:
        FakeEvent.reached = True


class OnItsWay(LateReading):
    """A reading as on a GPU, from a CPU tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = tensor
        self._event = FakeEvent()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Watch:
    FakeEvent.reached = False
    monkeypatch.setattr(checks, "LateReading", OnItsWay)
    return Watch("late", "raise", lambda: False)


def test_cpu_tensor_has_arrived() -> None:
    reading = LateReading(torch.tensor([1.0, 2.0]))
    assert reading.arrived
    assert reading.values() == [1.0, 2.0]


def test_window_that_has_not_arrived_is_not_waited_for(late: Watch) -> None:
    late.submit(0, BAD)
    late.submit(1, GOOD)
    late.submit(2, GOOD)
    assert not FakeEvent.reached
    FakeEvent.reached = True
    with pytest.raises(TrainkitError, match="optimizer step 0 "):
        late.submit(3, GOOD)


def test_reading_all_waits_for_the_last(late: Watch) -> None:
    late.submit(0, GOOD)
    late.submit(1, BAD)
    with pytest.raises(TrainkitError, match="optimizer step 1 "):
        late.read_all()
    assert FakeEvent.reached


def test_what_is_forgotten_is_not_read(late: Watch) -> None:
    late.submit(0, BAD)
    late.forget()
    late.read_all()
    assert not FakeEvent.reached


def test_checks_now_wait_for_their_own_window(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeEvent.reached = False
    monkeypatch.setattr(checks, "LateReading", OnItsWay)
    with pytest.raises(TrainkitError, match="optimizer step 7 "):
        Watch("now", "raise", lambda: False).submit(7, BAD)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_steps_on_a_gpu_wait_for_nothing() -> None:
    """torchtitan#4099: no micro-batch and no step makes the host wait."""
    parameter = nn.Parameter(torch.ones(1000, device="cuda"))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    accumulator = Accumulator(GivenWeight())
    weight = torch.tensor(3, device="cuda")

    def window(weight: Any) -> None:
        optimizer.zero_grad()
        accumulator.backward(parameter.mean(), weight)
        accumulator.backward(2 * parameter.mean(), 5)
        accumulator.finish(optimizer)
        optimizer.step()

    window(weight)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            window(weight)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    window(torch.tensor(-1.0, device="cuda"))
    with pytest.raises(TrainkitError, match="optimizer step 6 "):
        accumulator.watch.read_all()
