"""Fabric: the accumulator with its backward, on one process and on two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric

from tests.core.common import fresh_net, padded
from tests.core.conftest import OnRanks
from tests.core.test_ddp import WINDOWS, dealt, together
from tests.helpers import (
    OPTIMIZERS,
    deviation,
    ragged_sequences,
    token_loss,
    weights,
)
from trainkit import Accumulator, PerToken

SAMPLES = ragged_sequences(20)


def train_fabric(rank: int, world_size: int, reduction: Any, blocks: bool) -> Any:
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy="ddp")
    fabric.launch()
    return train(fabric, rank, dealt(windows(blocks), world_size), reduction, blocks)


def windows(blocks: bool) -> Any:
    """Without `no_backward_sync` all ranks need as many micro-batches."""
    return WINDOWS if blocks else [[[1, 3], [9, 1]], [[0], [5]], [[2, 2], [7, 1]]]


def train(fabric: Any, rank: int, dealt: Any, reduction: Any, blocks: bool) -> Any:
    module = fresh_net()
    net, steps = fabric.setup(module, OPTIMIZERS["adamw"](module.parameters()))
    strategy = PerToken(loss_reduction=reduction)
    accumulator = Accumulator(strategy, module=net, checks="now")
    for window in dealt:
        steps.zero_grad()
        cut = window[rank]
        for index, batch in enumerate(cut):
            waits = blocks and index < len(cut) - 1
            with fabric.no_backward_sync(net, enabled=waits):
                loss = token_loss(net, batch, reduction)
                accumulator.backward(loss, batch, backward=fabric.backward)
        accumulator.finish(steps)
        fabric.clip_gradients(net, steps, max_norm=1.0)
        steps.step()
    return weights(module)


def train_alone(windows: Any) -> torch.Tensor:
    net = fresh_net()
    steps = OPTIMIZERS["adamw"](net.parameters())
    for window in windows:
        steps.zero_grad()
        token_loss(net, together(window)).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        steps.step()
    return weights(net)


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_fabric_on_two_ranks_equals_one_process(
    reduction: str, blocks: bool, on_ranks: OnRanks
) -> None:
    results = on_ranks(train_fabric, 2, reduction, blocks)
    expected = train_alone(dealt(windows(blocks), 2))
    for found in results:
        assert deviation(found, expected, fresh_net()) <= 1e-10


def test_fabric_on_one_process_equals_big_batch() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    cut = [[[padded(SAMPLES[:1]), padded(SAMPLES[1:7])]], [[padded(SAMPLES[7:])]]]
    found = train(fabric, 0, cut, "mean", blocks=False)
    assert deviation(found, train_alone(cut), fresh_net()) <= 1e-10


def test_fabric_in_bfloat16_equals_big_batch_up_to_rounding() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    module = fresh_net(torch.float32)
    net, steps = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.5))
    accumulator = Accumulator(PerToken(), module=net)
    for samples in (SAMPLES[:2], SAMPLES[2:]):
        batch = padded(samples)
        loss = token_loss(net, batch)
        accumulator.backward(loss, batch, backward=fabric.backward)
    accumulator.finish(steps)
    steps.step()
    reference = fresh_net(torch.float32)
    token_loss(reference, padded(SAMPLES)).backward()
    torch.optim.SGD(reference.parameters(), lr=0.5).step()
    assert deviation(module, reference, fresh_net(torch.float32)) <= 2e-2
