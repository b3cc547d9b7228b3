"""`loss_reduction="total"`: a sum stays a sum, on any cut and number of ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.core.common import relative, run_window
from tests.core.conftest import OnRanks
from tests.helpers import (
    TOLERANCE,
    TokenNet,
    gradients,
    pad,
    ragged_sequences,
    token_loss,
)
from trainkit import Accumulator, PerSample, PerToken

EXACT = TOLERANCE[torch.float64]
DATA = ragged_sequences(8)
CUTS = ([8], [3, 3, 2], [5, 1, 1, 1])


def pieces(sizes: list[int]) -> list[Any]:
    return [pad(part) for part in cut(sizes)]


def cut(sizes: list[int]) -> list[Any]:
    rows = iter(DATA)
    return [[next(rows) for _ in range(size)] for size in sizes]


def plain_sum() -> tuple[Tensor, Tensor]:
    """What plain training steps with: the gradient of the sum, and the sum."""
    net = TokenNet(dtype=torch.float64)
    loss = token_loss(net, pad(DATA), "sum")
    loss.backward()
    return gradients(net), loss.detach()


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("sizes", CUTS)
@pytest.mark.parametrize("strategy", [PerSample, PerToken])
def test_total_equals_the_sum_of_the_whole_batch(
    strategy: Any, sizes: list[int], told: bool
) -> None:
    net = TokenNet(dtype=torch.float64)
    accumulator = Accumulator(strategy(loss_reduction="total"))
    parts = pieces(sizes)
    stats = None
    for _ in range(2):  # the second has another r
        net.zero_grad()
        if told:
            accumulator.expect(parts)
        for part in parts:
            accumulator.backward(token_loss(net, part, "sum"), part)
        stats = accumulator.finish(net.parameters())
    expected, loss = plain_sum()
    assert stats is not None
    assert relative(gradients(net), expected) <= EXACT
    torch.testing.assert_close(stats.loss, loss, rtol=1e-12, atol=0)


@pytest.mark.parametrize("sizes", CUTS)
def test_sum_is_divided_and_does_not_equal_the_sum(sizes: list[int]) -> None:
    """The control, and what the option says: even one micro-batch is divided."""
    net = TokenNet(dtype=torch.float64)
    run_window(net, pieces(sizes), PerSample(loss_reduction="sum"))
    expected, _ = plain_sum()
    assert relative(gradients(net), expected) == pytest.approx(1 - 1 / 8)


def test_total_beside_a_mean_equals_both_of_the_whole_batch() -> None:
    """Two terms, one of them a sum that stays a sum."""

    def terms(net: nn.Module, batch: Any) -> dict[str, Tensor]:
        both = {"ce": token_loss(net, batch), "all": token_loss(net, batch, "sum")}
        return {"ce": both["ce"], "all": 0.01 * both["all"]}

    whole, net = (TokenNet(dtype=torch.float64) for _ in range(2))
    loss = sum(terms(whole, pad(DATA)).values())
    assert isinstance(loss, Tensor)
    loss.backward()
    strategies = {"ce": PerToken(), "all": PerSample(loss_reduction="total")}
    accumulator = Accumulator(strategies)
    parts = pieces([5, 2, 1])
    accumulator.expect(parts)
    for part in parts:
        accumulator.backward(terms(net, part))
    stats = accumulator.finish(net.parameters())
    assert relative(gradients(net), gradients(whole)) <= EXACT
    torch.testing.assert_close(stats.loss, loss.detach(), rtol=1e-12, atol=0)


def test_total_that_weighs_nothing_keeps_its_gradient() -> None:
    """Nothing is divided, so there is no 0 / 0, and nothing to warn of."""
    net, whole = (TokenNet(dtype=torch.float64) for _ in range(2))
    accumulator = Accumulator(PerToken(loss_reduction="total"))
    batch = pad(DATA)
    ignored = {"ids": batch["ids"], "labels": torch.full_like(batch["labels"], -100)}
    for loop in (net, whole):
        loss = loop(batch["ids"]).square().sum()
        if loop is whole:
            loss.backward()
        else:
            accumulator.backward(loss, ignored)
    accumulator.finish(net.parameters())
    accumulator.check()
    assert relative(gradients(net), gradients(whole)) <= EXACT


def on_a_rank(rank: int, world_size: int, aggregation: str) -> Tensor:
    net = TokenNet(dtype=torch.float64)
    module: Any = net
    if aggregation == "mean":
        module = nn.parallel.DistributedDataParallel(net)
    accumulator = Accumulator(
        PerSample(loss_reduction="total"),
        module=module,
        aggregation="auto" if aggregation == "mean" else "none",
    )
    parts = cut([4, 1, 2, 1])[rank::2]
    for number, rows in enumerate(parts):
        last = number + 1 == len(parts)
        with module.no_sync() if aggregation == "mean" and not last else nullcontext():
            accumulator.backward(token_loss(module, pad(rows), "sum"), pad(rows))
    accumulator.finish(net.parameters())
    return gradients(net)


@pytest.mark.parametrize("aggregation", ["mean", "none"])
def test_total_over_two_ranks_equals_the_sum(
    aggregation: str, on_ranks: OnRanks
) -> None:
    expected, _ = plain_sum()
    for found in on_ranks(on_a_rank, 2, aggregation):
        assert relative(found, expected) <= EXACT
