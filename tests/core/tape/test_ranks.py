"""Ranks whose numbers of rows differ share the statistics of each layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.core.tape.cases import CASES, images, made
from tests.core.tape.common import EXACT, gradients, off_by, state, summed
from trainkit import exact_batch_norm
from trainkit.core.batch_norm.layers import BatchNorm


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
