"""A module in chunks on several ranks: as without chunks, and as in one process."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.core.common import whole_gradients
from tests.core.conftest import OnRanks
from tests.core.inside.common import (
    CLASSES,
    WIDTH,
    Net,
    batch,
    class_weighted,
    nt_xent,
    off_by,
)
from tests.helpers import NAIVE
from trainkit import Chunked, TrainkitError
from trainkit.core.inside.refusals import OF_ROWS, refuse_parts
from trainkit.core.split.partition import even_runs

EXACT = 1e-12
SIZE = 6  # of 20 rows in 4 chunks
STEPS = 3


class Rarely(Net):
    """With a part that is not used, and one that some rows do not use."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)
        self.rare, self.never = nn.Linear(CLASSES, CLASSES), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out, rare = super().forward(x), x[:, :1] > 1.5
        return torch.where(rare, self.rare(out), out) if rare.any() else out


class Model(nn.Module):
    """A net to cut, whose first weights may be used outside of it as well."""

    def __init__(self, dropout: float = 0.0, *, rarely: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = Rarely(dropout) if rarely else Net(dropout=dropout)

    def forward(self, x: Tensor, calls: int = 1, tied: bool = False) -> Tensor:
        out = self.net(x)
        if calls > 1:
            out = out + self.net(x.flip(1)).sigmoid()
        if tied:
            first: Any = self.net.body[0]
            out = out + first(x)[:, :CLASSES]
        return out


def data(rank: int, step: int) -> tuple[Tensor, Tensor]:
    return batch(20, seed=10 * step + rank)


def gathered(out: Tensor, labels: Tensor) -> Tensor:
    """Each row against those of all ranks; their mean over ranks is the whole's."""
    outs = torch.cat(list(all_gather(out)))
    everyone = [torch.empty_like(labels) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, labels)
    return nt_xent(outs, torch.cat(everyone))


LOSSES = {"own": nt_xent, "gathered": gathered}


def train(model: Any, rank: int, options: dict[str, Any]) -> Tensor:
    """The gradients of each step, and the weights at last."""
    stepping = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    call = {name: options[name] for name in ("calls", "tied") if name in options}
    loss, found = LOSSES[options.get("loss", "own")], []
    for step in range(STEPS):
        batches = [data(rank, step)]
        if options.get("no_sync"):
            batches.append(data(rank, step + 5))
        for number, (x, labels) in enumerate(batches):
            is_last = number == len(batches) - 1
            torch.manual_seed(100 * step + rank)
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss(model(x, **call), labels).backward()
        found.append(flat([p.grad for p in model.parameters()], model))
        stepping.step()
        stepping.zero_grad()
    return torch.stack([*found, flat(model.parameters(), model)])


def flat(tensors: Any, model: nn.Module) -> Tensor:
    pairs = zip(tensors, model.parameters(), strict=True)
    found = [torch.zeros_like(p) if t is None else t for t, p in pairs]
    return torch.cat([each.detach().flatten() for each in found])


def on_ddp(rank: int, world_size: int, options: dict[str, Any]) -> tuple[Tensor, ...]:
    rarely = "find_unused_parameters" in options
    of_ddp = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph")
    wrapping: Any = {name: options[name] for name in of_ddp if name in options}
    results = []
    for cut in (False, True):
        model = Model(options.get("dropout", 0.0), rarely=rarely).double()
        chunks = Chunked(model.net, size=SIZE)
        if not cut:
            chunks.remove()
        results.append(train(DDP(model, **wrapping), rank, options))
    return tuple(results)


PAIRS: list[dict[str, Any]] = [
    {},
    {"find_unused_parameters": True, "calls": 2},
    {"gradient_as_bucket_view": True, "calls": 2, "tied": True},
    {"static_graph": True, "tied": True},
    {"static_graph": True, "gradient_as_bucket_view": True, "loss": "gathered"},
    {"find_unused_parameters": True, "gradient_as_bucket_view": True, "no_sync": True},
]
"""How DDP wraps a model, and how that is used."""


@pytest.mark.parametrize("options", PAIRS, ids=str)
def test_ddp_in_chunks_equals_ddp(options: dict[str, Any], on_ranks: OnRanks) -> None:
    for wanted, found in on_ranks(on_ddp, 2, options):
        assert off_by(found, wanted) <= EXACT


def alone(dropout: float, num_chunks: int) -> Tensor:
    """One process with the rows of both ranks, whose chunks are in one graph."""
    model = Model(dropout).double()
    stepping = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = []
    for step in range(STEPS):
        losses = []
        for rank in range(2):
            x, labels = data(rank, step)
            torch.manual_seed(100 * step + rank)
            runs = even_runs(len(x), num_chunks)
            out = torch.cat([model(x[slice(*run)]) for run in runs])
            losses.append(nt_xent(out, labels))
        torch.stack(losses).mean().backward()
        found.append(flat([p.grad for p in model.parameters()], model))
        stepping.step()
        stepping.zero_grad()
    return torch.stack([*found, flat(model.parameters(), model)])


def test_dropout_under_ddp_is_that_of_the_chunks(on_ranks: OnRanks) -> None:
    wanted = alone(0.5, 4)
    for whole, found in on_ranks(on_ddp, 2, {"dropout": 0.5}):
        assert off_by(found, wanted) <= EXACT
        assert off_by(whole, wanted) > NAIVE  # the control: other draws


def different_chunks(rank: int, world_size: int) -> tuple[Tensor, ...]:
    found = []
    for size in (None, 6):
        model = Model().double()
        if size is not None:
            Chunked(model.net, size=size)
        x, labels = batch((21, 4)[rank], seed=rank)
        class_weighted(DDP(model)(x), labels).backward()
        found.append(flat([p.grad for p in model.parameters()], model))
    return tuple(found)


def test_ranks_of_ddp_may_have_unlike_numbers_of_chunks(on_ranks: OnRanks) -> None:
    for wanted, found in on_ranks(different_chunks, 2):
        assert off_by(found, wanted) <= EXACT


def by_hand(rank: int, world_size: int, part: str) -> Tensor:
    """FSDP2 of a cut whose own parts are not sharded, or around it."""
    torch.manual_seed(0)
    x = torch.randn(20, WIDTH, dtype=torch.float64)
    found = []
    for size in (None, 6):
        model: Any = Model().double()
        fully_shard(model.get_submodule(part))
        if part:
            fully_shard(model)
        if size is not None:
            Chunked(model.net, size=size)
        for _ in range(3):
            model.zero_grad()
            nt_xent(model(x), x).backward()
        found.append(whole_gradients(model))
    return torch.stack(found)


@pytest.mark.parametrize("part", ["", "net"], ids=["around", "itself"])
def test_graphs_are_kept_where_fsdp_shards_the_whole_cut(
    part: str, on_ranks: OnRanks
) -> None:
    for wanted, found in on_ranks(by_hand, 2, part):
        assert off_by(found, wanted) <= EXACT


def by_parts(rank: int, world_size: int) -> str:
    """FSDP2 on a part of the cut."""
    model: Any = Model().double()
    fully_shard(model.net.body)
    fully_shard(model)
    try:
        with Chunked(model.net, size=6):
            model(torch.randn(20, WIDTH, dtype=torch.float64))
    except TrainkitError as error:
        return str(error)
    return "ran"


def test_parts_of_a_cut_that_fsdp2_shards_are_refused(on_ranks: OnRanks) -> None:
    said = "sharded by fully_shard .FSDP2. for itself.* as one grou"
    for found in on_ranks(by_parts, 2):
        assert re.search(said, found)


def test_the_first_fsdp_within_is_refused() -> None:
    wrapper: Any = FullyShardedDataParallel
    wrapped = wrapper.__new__(wrapper)
    nn.Module.__init__(wrapped)  # it wants a GPU to be made
    with pytest.raises(TrainkitError, match="net: 0 is flattened by Fully"):
        refuse_parts(nn.ModuleList([wrapped]), "net", OF_ROWS)
