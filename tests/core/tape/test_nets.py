"""Exact BatchNorm in many nets and on ranks is the big batch's; what is on the device
does not grow with the batch; a real GPU."""

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
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from tests.benchmarks.measuring import LiveBytes
from tests.core.common import waiting_is_an_error
from tests.core.tape.common import (
    CASES,
    EXACT,
    NAIVE,
    any_loss,
    apart,
    check_same,
    gradients,
    images,
    made,
    off_by,
    state,
    step,
    summed,
)
from tests.zoo.conv_nets import DenseNet, ResNet, resnet
from trainkit import exact_batch_norm
from trainkit.core.batch_norm.layers import BatchNorm
from trainkit.core.tape import call, forward
from trainkit.core.tape.operations import Store

SIZES = [(8, 4), (9, 8), (6, 1), (3, 1), (2, 1), (4, 7)]


@pytest.mark.parametrize("name", CASES)
def test_a_cut_batch_is_the_big_batch_and_chunks_apart_are_not(name: str) -> None:
    wanted = step(name, 11)
    check_same(step(name, 11, 4), wanted)
    if name != "a_layer":
        assert off_by(apart(name, 11, 4), wanted.gradients) > NAIVE


@pytest.mark.parametrize(("rows", "size"), SIZES)
@pytest.mark.parametrize("name", ["resnet18", "shuffle_by_index", "no_momentum"])
def test_any_numbers_of_rows(name: str, rows: int, size: int) -> None:
    check_same(step(name, rows, size), step(name, rows), 1e-11)


@pytest.mark.parametrize("name", ["unet", "twice", "no_momentum"])
def test_ten_steps(name: str) -> None:
    big = made(name)
    own, plain = copy.deepcopy(big), copy.deepcopy(big)
    nets: list[nn.Module] = [big, exact_batch_norm(own, size=4), plain]
    optimizers = [SGD(net.parameters(), 0.002) for net in nets]
    for number in range(10):
        x = images(10 + number % 3, seed=number)
        for net, optimizer in zip(nets, optimizers, strict=True):
            parts = x.split(4) if net is plain else [x]
            any_loss([torch.cat([net(part) for part in parts])]).backward()
            optimizer.step()
            optimizer.zero_grad()
    found, wanted = own.state_dict().values(), big.state_dict().values()
    for one, other in zip(found, wanted, strict=True):
        assert off_by([one], [other]) <= 1e-10
    assert off_by(plain.state_dict().values(), wanted) > 1e-3


def test_single_precision_where_activations_are_smooth() -> None:
    wide, found = step("other_dims", 11), step("other_dims", 11, 4, torch.float32)
    assert off_by(found.gradients, wide.gradients) <= 2e-5
    assert off_by(found.state, wide.state) <= 2e-5


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_rounding_in_a_deep_net_is_no_link_between_rows(precision: Any) -> None:
    """In its own precision its gradients would differ by a hundredth, or by all."""
    torch.manual_seed(0)
    net = exact_batch_norm(resnet(first=16, widths=(64, 128, 256, 512)), size=5)
    with torch.autocast("cpu", enabled=precision is torch.bfloat16):
        assert net(torch.randn(11, 3, 64, 64)).isfinite().all()
    assert all(p.dtype is torch.float32 for p in net.parameters())


def on_rank(rank: int, world_size: int, name: str, sizes: list[int], ddp: bool) -> Any:
    """The gradients and buffers of one step, and the sums over ranks that it made."""
    own, num_sums = made(name), 0
    before = dist.all_reduce

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal num_sums
        num_sums += 1
        return before(*args, **options)

    net: Any = exact_batch_norm(own, size=4)
    if ddp:
        net = DistributedDataParallel(own, broadcast_buffers=False)
    dist.all_reduce = counted
    try:
        summed(CASES[name].call(net, images(sum(sizes)).split(sizes)[rank])).backward()
    finally:
        dist.all_reduce = before
    found = gradients(own)
    for each in found:
        each.mul_(world_size) if ddp else dist.all_reduce(each)
    return found, state(own), num_sums


@pytest.mark.parametrize("ddp", [False, True])
@pytest.mark.parametrize(
    ("sizes", "names"),
    [([7, 4], "frozen dict"), ([1, 10], "no_momentum"), ([9, 2, 5], "resnet18")],
)
def test_ranks_are_one_batch(
    sizes: list[int], names: str, ddp: bool, on_ranks: Any
) -> None:
    for name in names.split():
        big = made(name)
        summed(CASES[name].call(big, images(sum(sizes)))).backward()
        layers = [x for x in big.modules() if isinstance(x, BatchNorm) and x.training]
        results = on_ranks(on_rank, len(sizes), name, sizes, ddp)
        for found, buffers, num_sums in results:
            assert off_by(found, gradients(big)) <= EXACT
            assert off_by(buffers, state(big)) <= EXACT
            assert num_sums == 2 * len(layers)
    apart = made("resnet18")
    for part in images(sum(sizes)).split(4):
        if len(part) > 1:
            summed([apart(part)]).backward()
    whole = made("resnet18")
    summed([whole(images(sum(sizes)))]).backward()
    assert off_by(gradients(apart), gradients(whole)) > 0.1


# ---- memory --------------------------------------------------------------------------

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


def peak(make: Any, rows: int, *, is_whole: bool = False) -> int:
    """The most live bytes of the third call, in which nothing is checked."""
    torch.manual_seed(0)
    own: nn.Module = make()
    net = own if is_whole else exact_batch_norm(own, size=SIZE)
    x = images(rows, torch.float32)
    for _ in range(0 if is_whole else 2):
        summed([net(x[: 3 * SIZE])]).backward()
        own.zero_grad()
    with LiveBytes() as live:
        summed([net(x)]).backward()
    return live.peak


def test_a_batch_takes_the_memory_of_one_chunk() -> None:
    """Of a net whose values are all kept for later layers."""
    with numpy_as_host():
        few, more = peak(DenseNet, 16), peak(DenseNet, 64)
        assert more <= 1.25 * few
        assert peak(DenseNet, 256) <= 1.35 * few
    assert peak(DenseNet, 64, is_whole=True) > 5 * more


def test_a_call_leaves_no_tensor_to_the_collector() -> None:
    """A GPU's memory would wait for Python's collector, which does not see it."""
    net, x = exact_batch_norm(ResNet(), size=SIZE), images(3 * SIZE, torch.float32)

    def tensors() -> int:
        return sum(type(each) is torch.Tensor for each in gc.get_objects())

    for _ in range(4):
        summed([net(x)]).backward()
    gc.collect()
    gc.disable()
    try:
        before = tensors()
        summed([net(x)]).backward()
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
    spread = (vectors.softmax(1).mean(0) - 0.1).square().sum()
    (spread + vectors.pow(2).mean()).backward()


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
    with waiting_is_an_error():
        soft_step(net, x)


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
