"""Exact BatchNorm on a real GPU: values and memory, and the host waits for nothing."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.core.tape.resnet import resnet
from tests.helpers import gradients
from trainkit.core.joins.exact import exact_batch_norm
from trainkit.core.joins.host import OnHost, transport_to

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 2**20
BOTH = pytest.mark.parametrize("memory", ["device", "flat"])


def small_resnet() -> nn.Module:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    net = resnet(first=16, widths=(32, 64), depths=(2, 2), num_classes=10)
    return net.cuda()


def loss_of(vectors: Tensor) -> Tensor:
    return (vectors.softmax(1).mean(0) - 0.1).square().sum() + vectors.pow(2).mean()


@contextmanager
def no_host_waits() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def busy(work: Tensor) -> None:
    """Let the computing stream lag behind the host."""
    for _ in range(10):
        work.copy_(work @ work)


def test_values_come_back_while_the_device_is_busy_and_memory_is_used_again() -> None:
    device = torch.device("cuda", 0)
    transport = transport_to(device)
    assert isinstance(transport, OnHost)
    draw, work = random.Random(0), torch.zeros(1024, 1024, device=device)
    kept: list[tuple[Any, float]] = []
    wrong = torch.zeros((), device=device)
    torch.empty(MIB, pin_memory=True)  # the first one takes its time
    with no_host_waits():
        for number in range(400):
            action = draw.choice(["put", "put", "get", "fetch", "drop", "busy"])
            if action == "put":
                kept.append((transport.put(work.new_full((MIB,), number)), number))
            elif action == "busy":
                busy(work)
            elif kept:
                which = draw.randrange(len(kept))
                if action == "get":
                    wrong += (transport.get(kept[which][0]) != kept[which][1]).any()
                elif action == "fetch":
                    transport.fetch([kept[which][0]])
                else:
                    del kept[which]
        for one, value in kept:
            wrong += (transport.get(one) != value).any()
    assert float(wrong) == 0


def test_the_host_does_not_run_ahead_into_memory() -> None:
    transport = transport_to(torch.device("cuda", 0))
    work = torch.zeros(1024, 1024, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = [transport.put(work.new_full((MIB,), n)) for n in range(100)]
    assert torch.cuda.max_memory_allocated() - before <= 6 * 4 * MIB
    assert float(sum(transport.get(each)[0] for each in kept)) == sum(range(100))


@BOTH
@pytest.mark.parametrize("cut", [False, True])
def test_the_gradient_is_the_big_batch_s(memory: Any, cut: bool) -> None:
    net = small_resnet().double()
    reference = copy.deepcopy(net)
    images = torch.randn(64, 3, 32, 32, dtype=torch.float64, device="cuda")
    exact = exact_batch_norm(net, size=8 if cut else None, memory=memory)
    for _ in range(2):
        net.zero_grad()
        reference.zero_grad()
        if cut:
            loss_of(exact(images)).backward()
            loss_of(reference(images)).backward()
            continue
        for _, loss in exact.run(lambda x: loss_of(net(x)) / 8, images.split(8)):
            loss.backward()
        sum(loss_of(x) / 8 for x in reference(images).split(8)).backward()  # type: ignore[union-attr]
    found, wanted = gradients(net), gradients(reference)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-10
    for one, two in zip(net.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(one, two)


@BOTH
def test_a_window_waits_for_nothing(memory: Any) -> None:
    net = small_resnet()
    images = torch.randn(64, 3, 32, 32, device="cuda")
    exact = exact_batch_norm(net, memory=memory)

    def window() -> None:
        for _, loss in exact.run(lambda x: loss_of(net(x)), images.split(8)):
            loss.backward()

    window()
    window()
    with no_host_waits():
        window()


def peak(window: int, size: int | None) -> int:
    """The most bytes beyond parameters, gradients and images."""
    net, images = small_resnet(), torch.randn(window, 3, 64, 64, device="cuda")
    exact = exact_batch_norm(net, memory="flat") if size else None
    before = 0
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if exact is None:
            loss_of(net(images)).backward()
            continue
        for _, loss in exact.run(lambda x: loss_of(net(x)), images.split(size or 1)):
            loss.backward()
    return torch.cuda.max_memory_allocated() - before


def test_the_peak_does_not_grow_with_the_window() -> None:
    small, large = peak(64, 8), peak(512, 8)
    assert large <= 1.15 * small
    assert peak(512, None) > 3 * peak(64, None)
