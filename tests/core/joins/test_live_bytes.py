"""In segments, what is on the device does not grow with the window."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.benchmarks.live_bytes import LiveBytes
from tests.core.joins.cases import images
from tests.core.joins.common import engines_of, summed
from tests.core.joins.nets import Bottleneck, DenseNet, ResNet, UNet
from trainkit import exact_batch_norm

SIZE = 16


class ToNumPy:
    """Keeps tensors in memory that torch does not count, as a host does for a GPU."""

    def put(self, tensor: Tensor) -> Any:
        return np.array(tensor.numpy(), copy=True)

    def get(self, kept: Any) -> Tensor:
        return torch.from_numpy(kept).clone()

    def fetch(self, kept: Iterable[Any]) -> None:
        list(kept)


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "trainkit.core.joins.engine.transport_to"
    monkeypatch.setattr(name, lambda device, stays: ToNumPy())


def peak(make: Any, rows: int, memory: Any) -> int:
    """The most live bytes of the second window, when all has been traced."""
    torch.manual_seed(0)
    own: nn.Module = make()
    net = exact_batch_norm(own, memory=memory)
    x = images(rows, torch.float32)
    parts = {"first": x[: 2 * SIZE].split(SIZE), "whole": x.split(SIZE)}
    most = 0
    for window in parts.values():
        with LiveBytes() as live:
            for _, loss in net.run(lambda part: summed([net(part)]), window):
                loss.backward()
        own.zero_grad()
        most = live.peak
    assert [each.is_flat for each in engines_of(net)] == [memory == "flat"]
    return most


NETS = {
    "resnet": (ResNet, 256),
    "resnet, more rows": (ResNet, 1024),
    "unet": (UNet, 128),
    "densenet": (DenseNet, 128),
    "bottleneck": (lambda: ResNet(Bottleneck), 128),
}


@pytest.mark.parametrize(("make", "rows"), NETS.values(), ids=NETS.keys())
def test_segments_take_the_memory_of_one_micro_batch(make: Any, rows: int) -> None:
    few, many = peak(make, 64, "flat"), peak(make, rows, "flat")
    assert few / 1.15 <= many <= 1.15 * few


def test_one_graph_takes_more_for_a_larger_window() -> None:
    few, many = peak(ResNet, 64, "device"), peak(ResNet, 256, "device")
    assert many > 1.8 * few


def test_segments_take_less_than_one_graph() -> None:
    assert peak(ResNet, 256, "flat") < 0.7 * peak(ResNet, 256, "device")


@pytest.mark.parametrize("size", [None, SIZE])
@pytest.mark.parametrize("memory", ["device", "flat"])
def test_a_window_leaves_no_tensor_to_the_collector(memory: Any, size: Any) -> None:
    """A GPU's memory would wait for Python's collector, which does not see it."""
    net = exact_batch_norm(ResNet(), memory=memory, size=size)
    x = images(3 * SIZE, torch.float32)

    def step() -> None:
        if size is not None:
            summed([net(x)]).backward()
            return
        for _, loss in net.run(lambda part: summed([net(part)]), x.split(SIZE)):
            loss.backward()

    def tensors() -> int:
        return sum(type(each) is torch.Tensor for each in gc.get_objects())

    for _ in range(4):
        step()
    gc.collect()
    gc.disable()
    try:
        before = tensors()
        step()
        assert tensors() <= before
    finally:
        gc.enable()
