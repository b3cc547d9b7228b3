"""On several ranks it is measured whether a model sees its padding: by each rank alone,
or by all together where forward passes communicate. Nobody waits for another."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.helpers import deviation, raise_rank_errors, run_ranks, weights
from tests.lit.split.test_trim_check import (
    FULL,
    LENGTHS,
    SEES,
    Convolving,
    MeanOfAll,
    Pooled,
    batch_of,
    fit,
)
from tests.lit.windows.test_sharded import mesh_strategy, whole
from trainkit.core.split.micro_batching import MicroBatching

KINDS: dict[str, type[Pooled]] = {
    "masked": Pooled,
    "mean": MeanOfAll,
    "convolution": Convolving,
}
BATCHES = [  # of each rank: at first only one has padding
    [FULL, batch_of(LENGTHS, 5), FULL],
    [batch_of(LENGTHS[:5], 6), batch_of(LENGTHS, 7), FULL],
]


@dataclass
class Seen:
    weights: Tensor
    said: int


def sharded(kind: type[Pooled]) -> type[Pooled]:
    class Sharded(kind):  # type: ignore[misc,valid-type]
        def configure_model(self) -> None:
            if not any(isinstance(p, DTensor) for p in self.parameters()):
                assert self.device_mesh is not None
                mesh = self.device_mesh["data_parallel"]
                for part in (self.embed, self.conv, self.head):
                    fully_shard(part, mesh=mesh)

    return Sharded


def train(rank: int, world: int) -> dict[str, Seen]:
    seen = {}
    for name, kind in KINDS.items():
        for backend in ("ddp", "fsdp2"):
            made = kind if backend == "ddp" else sharded(kind)
            module = made(MicroBatching(size=2))
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                fit(
                    module,
                    BATCHES[rank],
                    devices=world,
                    use_distributed_sampler=False,
                    strategy=mesh_strategy(world, 1)
                    if backend == "fsdp2"
                    else DDPStrategy(
                        process_group_backend="gloo", find_unused_parameters=True
                    ),
                )
            number = sum(SEES in str(each.message) for each in said)
            seen[f"{name}, {backend}"] = Seen(whole(module), number)
    return seen


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Seen]]:
    return raise_rank_errors(run_ranks(train, 2))


def reference(kind: type[Pooled]) -> tuple[Tensor, Tensor]:
    module = kind()
    start = weights(module)
    pairs = zip(*BATCHES, strict=True)
    fit(module, [{k: torch.cat([a[k], b[k]]) for k in a} for a, b in pairs])
    return start, weights(module)


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", KINDS)
def test_two_ranks_of_which_one_has_padding_equal_one_process(
    name: str, backend: str, two_ranks: list[dict[str, Seen]]
) -> None:
    start, end = reference(KINDS[name])
    for result in (rank[f"{name}, {backend}"] for rank in two_ranks):
        assert deviation(result.weights, end, start) < 1e-12
        # Each rank says what it has found itself.
        assert result.said == 0 if name == "masked" else result.said <= 1
    found = [rank[f"{name}, {backend}"].said for rank in two_ranks]
    if name != "masked":
        assert found == ([1, 1] if backend == "ddp" else [0, 1])
