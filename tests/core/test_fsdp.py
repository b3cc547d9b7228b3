"""Sharded parameters: FSDP2 over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests.core.common import fresh_net, relative
from tests.core.conftest import OnRanks
from tests.core.test_ddp import WINDOWS, dealt, together
from tests.helpers import (
    OPTIMIZERS,
    deviation,
    gradients,
    token_loss,
    weights,
)
from trainkit import Accumulator, PerToken, TrainkitError
from trainkit.core._compat import gradient_divide_factors

EVEN = [
    [[1, 3], [9, 1]],
    [[0, 5], [1, 1]],
    [[0, 0], [2, 7]],
    [[1], [6]],
]


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train_sharded(
    rank: int, world_size: int, syncs_each: bool, reduction: Any
) -> tuple[torch.Tensor, list[float]]:
    net: Any = fresh_net()
    fully_shard(net)
    strategy = PerToken(loss_reduction=reduction)
    accumulator = Accumulator(strategy, module=net, checks="now")
    steps = OPTIMIZERS["adamw"](net.parameters())
    losses = []
    for window in dealt(EVEN, world_size):
        steps.zero_grad()
        cut = window[rank]
        for index, batch in enumerate(cut):
            if not syncs_each:
                net.set_requires_gradient_sync(index == len(cut) - 1)
            accumulator.backward(token_loss(net, batch, reduction), batch)
        stats = accumulator.finish(steps)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        steps.step()
        losses.append(float(stats.loss))
    return torch.cat([whole(p).detach().flatten() for p in net.parameters()]), losses


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("syncs_each", [True, False])
def test_fsdp2_equals_one_process(
    syncs_each: bool, reduction: str, on_ranks: OnRanks
) -> None:
    """Lightning's FSDP reduces after each micro-batch; a plain loop may wait."""
    results = on_ranks(train_sharded, 2, syncs_each, reduction)
    net = fresh_net()
    steps = OPTIMIZERS["adamw"](net.parameters())
    expected = []
    for window in dealt(EVEN, 2):
        steps.zero_grad()
        loss = token_loss(net, together(window))
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        steps.step()
        expected.append(loss.item())
    for found, losses in results:
        assert deviation(found, weights(net), weights(fresh_net())) <= 1e-10
        assert losses == pytest.approx(expected, rel=1e-10)


def narrow(rank: int, world_size: int) -> torch.Tensor:
    net: Any = fresh_net(torch.float32)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    fully_shard(net, mp_policy=policy)
    accumulator = Accumulator(PerToken(), module=net)
    for batch in dealt(EVEN, world_size)[0][rank]:
        accumulator.backward(token_loss(net, batch), batch)
    accumulator.finish(net.parameters())
    return torch.cat([whole(p.grad).double().flatten() for p in net.parameters()])


def test_fsdp2_in_bfloat16_equals_one_process_up_to_rounding(on_ranks: OnRanks) -> None:
    net = fresh_net(torch.float32)
    token_loss(net, together(dealt(EVEN, 2)[0])).backward()
    for found in on_ranks(narrow, 2):
        assert relative(found, gradients(net)) <= 2e-2


def adding(rank: int, world_size: int) -> torch.Tensor:
    net: Any = fresh_net()
    fully_shard(net)
    net.set_gradient_divide_factor(1.0)
    accumulator = Accumulator(PerToken(), module=net, aggregation="sum")
    for batch in dealt(EVEN, world_size)[0][rank]:
        accumulator.backward(token_loss(net, batch), batch)
    accumulator.finish(net.parameters())
    return torch.cat([whole(p.grad).flatten() for p in net.parameters()])


def test_fsdp2_that_was_told_to_add_up_equals_one_process(on_ranks: OnRanks) -> None:
    """torchtitan turns FSDP's own division off; torch does not show that it is."""
    net = fresh_net()
    token_loss(net, together(dealt(EVEN, 2)[0])).backward()
    for found in on_ranks(adding, 2):
        assert relative(found, gradients(net)) <= 1e-10


def divided(rank: int, world_size: int, factor: float | None) -> Any:
    net: Any = fresh_net()
    fully_shard(net)
    if factor is not None:
        net.set_gradient_divide_factor(factor)
    seen = gradient_divide_factors(net)
    try:
        accumulator = Accumulator(PerToken(), module=net)
    except TrainkitError as error:
        return str(error)
    for batch in dealt(EVEN, world_size)[0][rank]:
        accumulator.backward(token_loss(net, batch), batch)
    accumulator.finish(net.parameters())
    return seen, torch.cat([whole(p.grad).flatten() for p in net.parameters()])


@pytest.mark.parametrize("factor", [None, 1.0, 2.0])
def test_fsdp2_that_divides_by_a_factor_of_its_own_equals_one_process(
    factor: float | None, on_ranks: OnRanks
) -> None:
    """`auto` sees what `set_gradient_divide_factor` has done (1.0 in torchtitan)."""
    net = fresh_net()
    token_loss(net, together(dealt(EVEN, 2)[0])).backward()
    for seen, found in on_ranks(divided, 2, factor):
        assert seen == {factor}
        assert relative(found, gradients(net)) <= 1e-12


def test_fsdp2_that_divides_by_neither_is_refused(on_ranks: OnRanks) -> None:
    for text in on_ranks(divided, 2, 3.0):
        assert "makes FSDP divide by ['3.0'] over 2 ranks" in text


def saved_too_early(rank: int, world_size: int) -> str:
    net: Any = fresh_net()
    fully_shard(net)
    accumulator = Accumulator(PerToken(), module=net)
    net.set_requires_gradient_sync(False)
    batch = dealt(EVEN, world_size)[0][rank][0]
    accumulator.backward(token_loss(net, batch), batch)
    with pytest.raises(TrainkitError) as error:
        accumulator.state_dict(over_ranks=True)
    return str(error.value)


def test_gradients_that_fsdp2_holds_back_are_not_lost_in_a_checkpoint(
    on_ranks: OnRanks,
) -> None:
    for text in on_ranks(saved_too_early, 2):
        assert "no parameter of `module` has a gradient" in text
        assert "set_requires_gradient_sync(True)" in text


def test_windows_of_ddp_are_ragged() -> None:
    """What `EVEN` has in common with `WINDOWS`: ranks of unequal tokens."""
    for windows in (EVEN, WINDOWS):
        for window in dealt(windows, 2):
            tokens = [sum(int((b["labels"] != -100).sum()) for b in c) for c in window]
            assert len(set(tokens)) > 1
