"""What is on the device does not grow with the batch; a real GPU."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.benchmarks.measuring import LiveBytes
from tests.core.tape.common import images, summed
from tests.zoo.conv_nets import DenseNet, ResNet, UNet, pooled
from trainkit import exact_batch_norm
from trainkit.core.tape import call, forward
from trainkit.core.tape.operations import Store

SIZE = 4


class InNumPy(Store):
    """Keeps tensors in memory that torch does not count, as a host does for a GPU."""

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self.copies = True

    def _to_host(self, tensor: Tensor) -> Any:
        return np.array(tensor.detach().numpy(), copy=True)

    def _from_host(self, kept: Any) -> Tensor:
        return torch.from_numpy(kept).clone()


@contextlib.contextmanager
def numpy_as_host() -> Iterator[None]:
    with mock.patch.object(forward, "Store", InNumPy):
        with mock.patch.object(call, "Store", InNumPy):
            yield


class Small(nn.Module):
    """A net whose output takes next to no memory."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return pooled(self.net(x))


def step(net: nn.Module, x: Tensor) -> None:
    summed([net(x)]).backward()


def peak(make: Any, rows: int, *, is_whole: bool = False) -> int:
    """The most live bytes of the third call, in which nothing is checked."""
    torch.manual_seed(0)
    own: nn.Module = make()
    net = own if is_whole else exact_batch_norm(own, size=SIZE)
    x = images(rows, torch.float32)
    for _ in range(0 if is_whole else 2):
        step(net, x[: 3 * SIZE])
        own.zero_grad()
    with LiveBytes() as live:
        step(net, x)
    return live.peak


NETS = {
    "resnet": lambda: ResNet(per_stage=1),
    "unet": lambda: Small(UNet()),
    "densenet": DenseNet,
}


@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
def test_a_batch_takes_the_memory_of_one_chunk(make: Any) -> None:
    with numpy_as_host():
        few, more = peak(make, 16), peak(make, 64)
        assert more <= 1.25 * few
        if make is DenseNet:
            assert peak(make, 256) <= 1.35 * few
    assert peak(make, 64, is_whole=True) > 5 * more


def test_a_call_leaves_no_tensor_to_the_collector() -> None:
    """A GPU's memory would wait for Python's collector, which does not see it."""
    net, x = exact_batch_norm(ResNet(), size=SIZE), images(3 * SIZE, torch.float32)

    def tensors() -> int:
        return sum(type(each) is torch.Tensor for each in gc.get_objects())

    for _ in range(4):
        step(net, x)
    gc.collect()
    gc.disable()
    try:
        before = tensors()
        step(net, x)
        assert tensors() <= before
    finally:
        gc.enable()


# ---- a real GPU: values, memory, and a host that does not wait -----------------------


def gpu(test: Any) -> Any:
    """Marks a test that needs a CUDA device."""
    skips = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    return pytest.mark.gpu(skips(test))


def soft_step(net: nn.Module, x: Tensor) -> None:
    vectors = net(x)
    (
        (vectors.softmax(1).mean(0) - 0.1).square().sum() + vectors.pow(2).mean()
    ).backward()


@gpu
def test_a_batch_on_the_device_is_the_big_batch() -> None:
    torch.manual_seed(0)
    own = ResNet().cuda().double()
    big, x = copy.deepcopy(own), torch.randn(37, 3, 16, 16).cuda().double()
    assert Store(1, x.device).copies
    soft_step(exact_batch_norm(own, size=8), x)
    soft_step(big, x)
    for one, other in zip(own.parameters(), big.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-7, atol=1e-10)


@gpu
def test_the_host_does_not_wait() -> None:
    own, x = ResNet().cuda(), torch.randn(32, 3, 16, 16).cuda()
    net = exact_batch_norm(own, size=8)
    for _ in range(4):  # calls 1, 2 and 4 are checked
        soft_step(net, x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        soft_step(net, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu
def test_memory_does_not_grow_with_the_batch() -> None:
    peaks = []
    for rows in (64, 256):
        net = exact_batch_norm(ResNet(width=32).cuda(), size=16)
        x = torch.randn(rows, 3, 64, 64).cuda()
        soft_step(net, x)
        soft_step(net, x)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        soft_step(net, x)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 1.3 * peaks[0]
