"""Exact BatchNorm in many nets and on ranks is the big batch's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

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
from tests.zoo.conv_nets import resnet
from trainkit import exact_batch_norm
from trainkit.core.batch_norm.layers import BatchNorm

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
def test_rounding_in_a_deep_net_is_no_link_between_rows(
    precision: torch.dtype,
) -> None:
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
@pytest.mark.parametrize("sizes", [[7, 4], [1, 10], [9, 2, 5]])
def test_ranks_are_one_batch(sizes: list[int], ddp: bool, on_ranks: Any) -> None:
    for name in ("resnet18", "no_momentum", "frozen", "dict"):
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
