"""Ranks that no backend brings together: trainkit adds their gradients up."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.core.common import GivenWeight, fresh_net, padded, relative, run_window
from tests.core.conftest import OnRanks
from tests.helpers import (
    NAIVE,
    gradients,
    ragged_sequences,
    token_loss,
)
from trainkit import Accumulator, PerToken, TrainkitError

SAMPLES = ragged_sequences(30, longest=30)


def assignments(world_size: int, number: int = 12) -> list[list[list[list[int]]]]:
    """Windows at random: any samples, cut anywhere, on any rank; some ranks get no
    micro-batch at all."""
    draw = random.Random(world_size)
    windows = []
    for _ in range(number):
        order = draw.sample(range(len(SAMPLES)), draw.randint(1, len(SAMPLES)))
        ranks: list[list[list[int]]] = [[] for _ in range(world_size)]
        while order:
            size = draw.randint(1, 6)
            draw.choice(ranks).append(order[:size])
            order = order[size:]
        windows.append(ranks)
    return windows


def batches(cut: list[list[int]]) -> list[Any]:
    return [padded([SAMPLES[i] for i in indices]) for indices in cut]


def any_assignment(rank: int, world_size: int, reduction: Any) -> list[Any]:
    net = fresh_net()
    strategy = PerToken(loss_reduction=reduction)
    accumulator = Accumulator(strategy, module=net, aggregation="none", checks="now")
    found = []
    for window in assignments(world_size):
        net.zero_grad()
        stats = run_window(net, batches(window[rank]), accumulator)
        found.append((gradients(net), float(stats.loss)))
    return found


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_any_assignment_to_ranks_equals_big_batch(
    world_size: int, reduction: Any, on_ranks: OnRanks
) -> None:
    results = on_ranks(any_assignment, world_size, reduction)
    for index, window in enumerate(assignments(world_size)):
        net = fresh_net()
        everything = [i for cut in window for indices in cut for i in indices]
        loss = token_loss(net, batches([everything])[0])
        loss.backward()
        for found in results:
            gradient, value = found[index]
            assert relative(gradient, gradients(net)) <= 1e-10
            assert value == pytest.approx(loss.item(), rel=1e-10)


def averages(rank: int, world_size: int) -> torch.Tensor:
    net = fresh_net()
    run_window(net, batches(assignments(world_size)[0][rank]), no_ranks())
    gradient = gradients(net)
    dist.all_reduce(gradient)
    return gradient / world_size


def no_ranks() -> Accumulator:
    """Exact on each rank, and blind to the others."""
    accumulator = Accumulator(PerToken(), aggregation="none")
    accumulator.ranks = type(accumulator.ranks)()
    return accumulator


def test_mean_of_rank_means_differs_from_big_batch(on_ranks: OnRanks) -> None:
    """The control: transformers#34242, verl#6609, a denominator for each rank."""
    (found, _) = on_ranks(averages, 2)
    net = fresh_net()
    cut = assignments(2)[0]
    token_loss(net, batches([[i for c in cut for x in c for i in x]])[0]).backward()
    assert relative(found, gradients(net)) > NAIVE


class Parts(nn.Module):
    """Parameters that not every micro-batch uses, one with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        kinds: dict[str, Any] = {"dtype": torch.float64}
        self.all = nn.Parameter(torch.ones(2, **kinds))
        self.first = nn.Parameter(torch.ones(3, **kinds))
        self.never = nn.Parameter(torch.ones(2, **kinds))
        self.frozen = nn.Parameter(torch.ones(2, **kinds), requires_grad=False)
        self.narrow = nn.Parameter(torch.ones(2, dtype=torch.float32))
        self.table = nn.Embedding(4, 2, sparse=True, **kinds)

    def loss(self, rank: int, x: float) -> torch.Tensor:
        value = (self.all.sum() + self.narrow.sum()) * x
        if rank == 0:
            value = value + (self.first * x).sum()
        else:
            value = value + self.table(torch.tensor([1, 1, 3])).sum() * 0.1 * x
        return value + 0 * self.frozen.sum()


def unevenly_used(rank: int, world_size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    parts = Parts()
    accumulator = Accumulator(GivenWeight(), aggregation="none")
    for weight, x in [(3, 1.0), (1, 2.0)] if rank == 0 else [(4, 5.0)]:
        accumulator.backward(parts.loss(rank, x), weight)
    accumulator.finish(parts.parameters())
    return {n: p.grad for n, p in parts.named_parameters()}


def test_parameters_used_on_some_ranks_equal_big_batch(on_ranks: OnRanks) -> None:
    torch.manual_seed(0)
    whole = Parts()
    losses = [3 * whole.loss(0, 1.0), whole.loss(0, 2.0), 4 * whole.loss(1, 5.0)]
    (sum(losses) / 8).backward()  # type: ignore[union-attr]
    for found in on_ranks(unevenly_used, 2):
        assert found.keys() == dict(whole.named_parameters()).keys()
        for name, parameter in whole.named_parameters():
            if parameter.grad is None:
                assert found[name] is None, name
            else:
                torch.testing.assert_close(
                    found[name].to_dense(), parameter.grad.to_dense()
                )


def empty_and_finished_twice(rank: int, world_size: int) -> str:
    p = nn.Parameter(torch.ones(()))
    accumulator = Accumulator(GivenWeight(), aggregation="none", checks="now")
    accumulator.backward(p * 2, 3)
    accumulator.finish([p])
    with pytest.raises(TrainkitError) as error:
        accumulator.finish([p])
    assert p.grad is not None
    assert float(p.grad) == 2  # not multiplied by 0 / 0
    return str(error.value)


def test_window_that_is_empty_on_every_rank_is_refused(on_ranks: OnRanks) -> None:
    for text in on_ranks(empty_and_finished_twice, 2):
        assert "optimizer step 1 (counted from 0): the window was empty" in text


def flagged(rank: int, world_size: int, kind: str, checks: Any) -> str:
    p = nn.Parameter(torch.ones(()))
    accumulator = Accumulator(GivenWeight(), aggregation="none", checks=checks)

    def window(is_bad: bool) -> None:
        weight = torch.tensor(-1.0 if is_bad and kind == "weight" else 2.0)
        loss = float("nan") if is_bad and kind == "loss" else 1.0
        accumulator.backward(p * loss, weight)
        accumulator.finish([p])

    window(False)
    if checks == "late":
        window(rank > 0)
    with pytest.raises(TrainkitError) as error:
        window(rank > 0)
    return f"after {accumulator.num_windows} windows: {error.value}"


@pytest.mark.parametrize("kind", ["weight", "loss"])
@pytest.mark.parametrize(("checks", "seen"), [("late", 3), ("now", 2)])
def test_flag_stops_every_rank_and_names_the_one(
    kind: str, checks: Any, seen: int, on_ranks: OnRanks
) -> None:
    for text in on_ranks(flagged, 3, kind, checks):
        assert text.startswith(f"after {seen} windows: optimizer step 1 ")
        assert "ranks 1, 2: " in text
