"""What the core uses of FSDP2 beyond its documentation still holds."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.core.conftest import OnRanks
from trainkit.core import _compat


def layers() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])


def used(rank: int, world_size: int) -> dict[str, Any]:
    net = layers()
    fully_shard([net[1], net[2]])
    fully_shard(net[3])
    fully_shard(net)
    parts, x = [net[1], net[2], net[3]], torch.ones(2, 4)
    is_whole = lambda: [not isinstance(each.weight, DTensor) for each in parts]  # noqa: E731
    net(x)  # finds out which module is the root
    found: dict[str, Any] = {"before": is_whole()}
    with _compat.gathered(parts):
        if rank == 0:  # the other rank sends nothing, so this one waits for nothing
            net[3](net[2](net[1](x)))
            net[1](x)  # half of a group
        found["gathered"] = is_whole()
    found["after"] = is_whole()
    found["units"] = _compat.shared_units([net[1]]) == {net[1], net[2]}
    ranks = _compat.ranks_of_shards(net[3])
    assert ranks is not None
    found["ranks"] = (dist.get_world_size(ranks[0]), ranks[1].type)
    group = net[3]._get_fsdp_state()._fsdp_param_groups[0]
    net(x).sum().backward()
    flags = []
    for reduces in (True, False):
        with _compat.nested_pass(parts, reduces=reduces):
            flags.append((group.reduce_grads, group.all_reduce_grads))
    found["flags"] = [*flags, (group.reduce_grads, group.all_reduce_grads)]
    net.zero_grad()
    net(x).sum().backward()
    found["gradient"] = net[3].weight.grad.full_tensor()
    return found


def test_fsdp2_is_reached_as_before(on_ranks: OnRanks) -> None:
    net = layers()
    net(torch.ones(2, 4)).sum().backward()
    for found in on_ranks(used, 2):
        assert found["before"] == found["after"] == [False] * 3
        assert found["gathered"] == [True] * 3
        assert found["units"]
        assert found["ranks"] == (2, "cpu")
        assert found["flags"] == [(True, True), (False, False), (True, True)]
        torch.testing.assert_close(found["gradient"], net[3].weight.grad)
