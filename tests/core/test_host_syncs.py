"""A step makes the host wait for nothing of trainkit's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.core.common import CASES, GivenWeight, cut, fresh_net, run_open
from tests.helpers import ragged_sequences, token_loss
from trainkit import Accumulator, NoiseMoments, PerToken, TrainkitError

PARTS = cut(ragged_sequences(12), (1, 4, 7))

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


def run(waits: Waits, accumulator: Accumulator, loss: Any = token_loss) -> NoiseMoments:
    """Six windows, of which the noise is measured too."""
    net = fresh_net(torch.float32)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    moments = NoiseMoments(accumulator, optimizer)
    waits.found.clear()
    with waits:
        for window in range(6):
            if window:
                moments.watch()
            run_open(accumulator, net, PARTS, loss)
            stats = accumulator.finish(optimizer, slots=4)
            if window:
                moments.add(stats, samples=12)
            optimizer.step()
            optimizer.zero_grad()
    return moments


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("case", ["tokens", "samples", "class weights"])
def test_step_waits_for_nothing(
    case: str, reduction: Any, waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchtitan#4099: no `.item()` on the path of a step. The flags are read when
    they have arrived, as a reading on a GPU is."""
    make, loss, _ = CASES[case]
    accumulator = Accumulator(make(loss_reduction=reduction))
    monkeypatch.setattr(accumulator.watch, "read_arrived", lambda: None)
    moments = run(waits, accumulator, loss)
    assert waits.found == []
    assert moments.estimate() is not None


def test_late_reading_is_one_copy_for_each_window(waits: Waits) -> None:
    run(waits, Accumulator(PerToken()))
    assert waits.found == ["tolist"] * 5  # the last one is still waiting


def test_counting_waits_finds_one(waits: Waits) -> None:
    """The control."""
    with waits:
        torch.ones(()).item()
        bool(torch.ones(()))
        torch.ones(3)[torch.ones(3) > 0]
    assert {"item", "__bool__", "aten::index"} <= set(waits.found)


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
        accumulator.check()
