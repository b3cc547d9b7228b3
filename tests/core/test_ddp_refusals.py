"""What is refused under DDP over gloo, and when its ranks are apart."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.core.common import GivenWeight, fresh_net, padded
from tests.core.conftest import OnRanks
from tests.helpers import (
    ragged_sequences,
    token_loss,
)
from trainkit import Accumulator, PerToken, TrainkitError

SAMPLES = ragged_sequences(2)


def refused_by_ddp(rank: int, world_size: int, case: str) -> str:
    net = fresh_net()
    outside = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
    net.embed.requires_grad_(case != "frozen")
    ddp = DDP(net)
    batch = padded(SAMPLES)
    if case == "noop":
        ddp.register_comm_hook(None, noop_hook)
    try:
        said: Any = "none" if case == "none" else "auto"
        accumulator = Accumulator(PerToken(), module=ddp, aggregation=said)
        if case == "no_sync":
            with ddp.no_sync():
                accumulator.backward(token_loss(ddp, batch), batch)
            accumulator.finish(net.parameters())
        elif case == "join":
            with ddp.join():
                accumulator.backward(token_loss(ddp, batch), batch)
        else:
            net.embed.requires_grad_()
            loss = token_loss(ddp, batch) * (outside if case == "outside" else 1)
            accumulator.backward(loss, batch)
            accumulator.finish(
                [*net.parameters(), *([outside] if case == "outside" else [])]
            )
    except TrainkitError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("none", "aggregation='none': the module is DistributedDataParallel"),
        ("no_sync", "the window's last backward pass ran under no_sync()"),
        ("noop", "leaves the ranks' gradients apart"),
        (
            "outside",
            "parameters: 1 to be stepped, the first of shape [], are not averaged",
        ),
        ("frozen", "are not averaged by DistributedDataParallel"),
        ("join", "DistributedDataParallel.join(): it answers for ranks"),
    ],
)
def test_what_ddp_does_not_average_is_refused(
    case: str, text: str, on_ranks: OnRanks
) -> None:
    for found in on_ranks(refused_by_ddp, 2, case):
        assert text in found


def split_no_sync(rank: int, world_size: int, which: str) -> list[float]:
    """The forward and the backward pass on different sides of `no_sync()`."""
    p = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.ones_(p.weight)
    ddp = DDP(p)
    accumulator = Accumulator(GivenWeight(), module=ddp)
    x = torch.full((1, 1), 1.0 + rank, dtype=torch.float64)
    with ddp.no_sync() if which == "forward" else contextlib.nullcontext():
        loss = ddp(x).sum()
    with ddp.no_sync() if which == "backward" else contextlib.nullcontext():
        accumulator.backward(loss, 1 + rank)
    if which == "forward":
        with pytest.raises(
            TrainkitError, match=r"last backward pass ran under no_sync"
        ):
            accumulator.finish(ddp.parameters())
        return []
    accumulator.finish(ddp.parameters())
    return [float(p.weight.grad)]  # type: ignore[arg-type]


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_forward_pass_decides_whether_ranks_are_apart(
    which: str, on_ranks: OnRanks
) -> None:
    for found in on_ranks(split_no_sync, 2, which):
        assert found == ([] if which == "forward" else [pytest.approx(5 / 3)])
