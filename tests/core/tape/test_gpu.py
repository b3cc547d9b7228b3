"""Exact BatchNorm on a real GPU: values, memory, and a host that does not wait."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.core.tape.nets import ResNet
from trainkit import exact_batch_norm
from trainkit.core.tape.operations import Store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def step(net: nn.Module, x: Tensor) -> None:
    vectors = net(x)
    (
        (vectors.softmax(1).mean(0) - 0.1).square().sum() + vectors.pow(2).mean()
    ).backward()


def test_a_batch_on_the_device_is_the_big_batch() -> None:
    torch.manual_seed(0)
    own = ResNet().cuda().double()
    big, x = copy.deepcopy(own), torch.randn(37, 3, 16, 16).cuda().double()
    assert Store(1, x.device).copies
    step(exact_batch_norm(own, size=8), x)
    step(big, x)
    for one, other in zip(own.parameters(), big.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-7, atol=1e-10)


def test_the_host_does_not_wait() -> None:
    own, x = ResNet().cuda(), torch.randn(32, 3, 16, 16).cuda()
    net = exact_batch_norm(own, size=8)
    for _ in range(4):  # calls 1, 2 and 4 are checked
        step(net, x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(net, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_does_not_grow_with_the_batch() -> None:
    peaks = []
    for rows in (64, 256):
        net = exact_batch_norm(ResNet(width=32).cuda(), size=16)
        x = torch.randn(rows, 3, 64, 64).cuda()
        step(net, x)
        step(net, x)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(net, x)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 1.3 * peaks[0]
