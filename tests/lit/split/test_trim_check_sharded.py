"""Whether a model sees its padding, where forward passes communicate."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.helpers import deviation, raise_rank_errors, run_ranks, weights
from tests.lit.split.test_trim_check import (
    BATCHES,
    CUTS,
    FULL,
    SEES,
    MeanOfAll,
    Pooled,
    fit,
)
from tests.lit.windows.test_sharded import mesh_strategy, whole

RAGGED = [BATCHES[0], BATCHES[2], BATCHES[0]]
Seen = tuple[Tensor, list[str]]


class Sharded(Pooled):
    """Its layers bring their weights together in each forward pass."""

    def configure_model(self) -> None:
        if any(isinstance(p, DTensor) for p in self.parameters()):
            return
        assert self.device_mesh is not None
        mesh = self.device_mesh["data_parallel"]
        for layer in (self.embed, self.conv, self.head):
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)


class Seeing(MeanOfAll, Sharded): ...


class Later(Pooled):
    def pooled(self, hidden: Tensor, mask: Tensor) -> Tensor:
        begins = self.global_step >= 1
        return hidden.mean(1) if begins else super().pooled(hidden, mask)


class SeeingLater(Later, Sharded): ...


KINDS = (Sharded, Seeing, SeeingLater)


def train_all(rank: int, world: int) -> list[Seen]:
    return [train(rank, world, kind) for kind in KINDS]


def train(rank: int, world: int, kind: type[Sharded]) -> Seen:
    module = kind(CUTS[0])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(
            module,
            [RAGGED, [FULL] * 3][rank],
            strategy=mesh_strategy(world, 1),
            devices=world,
            use_distributed_sampler=False,
        )
    return whole(module), [str(each.message) for each in said]


@pytest.fixture(scope="module")
def two_ranks() -> list[list[Seen]]:
    return raise_rank_errors(run_ranks(train_all, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_has_padding_and_both_measure_alike(
    kind: Any, two_ranks: list[list[Seen]]
) -> None:
    results = [rank[KINDS.index(kind)] for rank in two_ranks]
    plain = {Sharded: Pooled, Seeing: MeanOfAll, SeeingLater: Later}[kind]
    one, start = plain(), weights(plain())
    fit(one, [{k: torch.cat([b[k], FULL[k]]) for k in FULL} for b in RAGGED])
    for found, _ in results:
        assert deviation(found, weights(one), start) < 1e-9
    says = any(SEES in text for text in results[0][1])
    assert says == (kind is not Sharded)
