"""The noise scale on two ranks: sums over all of their micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import (
    TokenModule,
    pad,
    ragged_sequences,
    raise_rank_errors,
    rank_loader,
    run_cases,
    token_loss,
    trainer,
    weights,
)
from tests.lit.noise.test_callback import KeepTable
from trainkit import AccumulationCallback, MicroBatching, PerToken

WORLD, BATCH = 2, 4
DATA = ragged_sequences(48)
WAYS: dict[str, dict[str, Any]] = {
    "streamed": {"accumulate": 3},
    "one micro-batch each": {},
    "split in several batches": {"batch": 8, "cut": 4, "accumulate": 2},
}


def train(rank: int, world: int, way: str, measured: bool) -> tuple[Tensor, Any, bool]:
    """The weights in the end, the sums, and whether the ranks have the same ones."""
    cut, kept = WAYS[way].get("cut"), KeepTable()
    micro = None if cut is None else MicroBatching(size=cut, trim=False)
    own = AccumulationCallback(PerToken(), micro_batching=micro)
    module = TokenModule(dtype=torch.float64)
    fit = trainer(
        WAYS[way].get("accumulate", 1),
        strategy="ddp",
        devices=world,
        use_distributed_sampler=False,
        callbacks=[kept, kept.noise, own] if measured else [own],
    )
    fit.fit(module, rank_loader(DATA, WAYS[way].get("batch", BATCH), rank, world))
    table = kept.table if measured else torch.zeros(1)
    all_tables = [torch.empty_like(table) for _ in range(world)]
    torch.distributed.all_gather(all_tables, table)
    return weights(module), table, torch.equal(*all_tables)


@pytest.fixture(scope="module")
def ends() -> dict[Any, list[Any]]:
    cases: Any = {(way, m): (train, way, m) for way in WAYS for m in (True, False)}
    return run_cases(WORLD, cases)


def by_hand(way: str) -> Tensor:
    """The sums of the first window, by one process."""
    net = TokenModule(dtype=torch.float64).net
    size = WAYS[way].get("batch", BATCH) * WAYS[way].get("accumulate", 1)
    contributions, counts = [], []
    for rank in range(WORLD):
        own = DATA[rank::WORLD][:size]
        for start in range(0, size, BATCH):
            batch = pad(own[start : start + BATCH])
            found = torch.autograd.grad(token_loss(net, batch), list(net.parameters()))
            counts.append(float((batch["labels"] != -100).sum()))
            contributions.append(counts[-1] * torch.cat([g.flatten() for g in found]))
    u, w = torch.stack(contributions), torch.tensor(counts, dtype=torch.float64)
    sums = [u.sum(0).square().sum(), u.square().sum(), w.sum() ** 2, w @ w, w.sum()]
    return torch.stack([*sums, torch.tensor(float(size * WORLD)), torch.ones(())])


@pytest.mark.parametrize("way", WAYS)
def test_sums_are_those_of_all_ranks_and_the_training_is_the_same_to_the_bit(
    way: str, ends: dict[Any, list[Any]]
) -> None:
    with_it, without = (raise_rank_errors(ends[way, m]) for m in (True, False))
    assert (with_it[0][1][0] / by_hand(way) - 1).abs().max() < 1e-6
    for one, other in zip(with_it, without, strict=True):
        assert one[2]
        assert torch.equal(one[0], other[0])
