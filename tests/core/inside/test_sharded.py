"""A cut module whose parts FSDP2 shards: chunks equal the whole batch on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.core.common import whole
from tests.core.conftest import OnRanks
from tests.core.inside.common import CLASSES, WIDTH, batch, nt_xent, off_by
from trainkit import Chunked, TrainkitError
from trainkit.core import _compat
from trainkit.core.inside import forward
from trainkit.core.split.partition import even_runs

EXACT = 1e-12
ROWS = 20
STEPS = 2  # the second begins with what the first has left


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.line, self.drop = nn.Linear(8, 8), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.line(x)))


class Deep(nn.Module):
    """Blocks between two layers of its own."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Model(nn.Module):
    """A module to cut, and a layer after it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.deep = Deep(dropout)
        self.out = nn.Linear(CLASSES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.deep(x))


def sharded(how: str, *, dropout: float = 0.0, dtype: Any = torch.float64, **options):
    """A model that `fully_shard` was called on."""
    model: Any = Model(dropout).to(dtype)
    deep = model.deep
    units = {
        "root": [],
        "cut": [deep],
        "blocks": [*deep.blocks],
        "blocks and cut": [*deep.blocks, deep],
        "all": [deep.first, *deep.blocks, deep.last, deep],
        "together": [*deep.blocks[:1], [deep.blocks[1], deep.blocks[2]]],
        "blocks alone": [*deep.blocks],
    }[how]
    for unit in units:
        fully_shard(unit, **options)
    if how != "blocks alone":
        fully_shard(model, **options)
    return model


Of = Callable[[Any], Tensor]


def own(tensor: Any) -> Tensor:
    """This rank's shard, which nobody sends."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module, of: Of = own) -> Tensor:
    found = [
        torch.zeros_like(of(p)) if p.grad is None else of(p.grad)
        for p in model.parameters()
    ]
    return torch.cat([each.detach().double().flatten() for each in found])


def weights(model: nn.Module, of: Of = own) -> Tensor:
    return torch.cat([of(p).detach().flatten() for p in model.parameters()])


def data(rank: int, step: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    return batch(rows, seed=10 * step + rank)


def train(
    model: Any,
    rank: int,
    optimizer: Any,
    *,
    calls: int = 1,
    rows: int = ROWS,
    of: Of = own,
) -> Any:
    """Gradients of each step, and the weights at last."""
    stepping, found = optimizer(model.parameters()), []
    for step in range(STEPS):
        x, labels = data(rank, step, rows)
        torch.manual_seed(100 * step + rank)
        outs = [model(each) for each in (x, x.flip(1))[:calls]]
        nt_xent(torch.stack(outs).sum(0), labels).backward()
        found.append(gradients(model, of))
        stepping.step()
        stepping.zero_grad()
    return torch.stack([*found, weights(model, of)])


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.01)


def both(rank: int, world_size: int, how: str, calls: int, options: Any) -> Any:
    optimizer = options.pop("optimizer", sgd)
    plain = train(sharded(how, **options), rank, optimizer, calls=calls)
    model = sharded(how, **options)
    with Chunked(model.deep, size=6):
        return plain, train(model, rank, optimizer, calls=calls)


SHARDINGS = [
    "root",
    "cut",
    "blocks",
    "blocks and cut",
    "all",
    "together",
    "blocks alone",
]


@pytest.mark.parametrize(("reshards", "calls"), [(True, 2), (False, 1)])
@pytest.mark.parametrize("how", SHARDINGS)
def test_steps_in_chunks_equal_those_of_whole_batches(
    how: str, reshards: bool, calls: int, on_ranks: OnRanks
) -> None:
    options = {"reshard_after_forward": reshards, "optimizer": adamw}
    for wanted, found in on_ranks(both, 2, how, calls, options):
        assert off_by(found, wanted) <= EXACT


def alone(rows: tuple[int, int], num_chunks: int, dropout: float) -> Tensor:
    """One process without FSDP, with the same chunks in one graph."""
    model = Model(dropout).double()
    stepping, found = sgd(model.parameters()), []
    for step in range(STEPS):
        for rank in range(2):
            x, labels = data(rank, step, rows[rank])
            torch.manual_seed(100 * step + rank)
            runs = even_runs(len(x), num_chunks)
            deep = torch.cat([model.deep(x[slice(*run)]) for run in runs])
            (nt_xent(model.out(deep), labels) / 2).backward()
        found.append(gradients(model))
        stepping.step()
        stepping.zero_grad()
    return torch.stack([*found, weights(model)])


def with_dropout(rank: int, world_size: int, rows: tuple[int, int], how: str) -> Any:
    model = sharded(how, dropout=0.5)
    with Chunked(model.deep, size=6):
        return train(model, rank, sgd, rows=rows[rank], of=whole)


@pytest.mark.parametrize("rows", [(20, 20), (20, 14)], ids=str)
@pytest.mark.parametrize("how", ["blocks", "all"])
def test_dropout_on_ranks_equals_the_same_chunks_in_one_process(
    how: str, rows: tuple[int, int], on_ranks: OnRanks
) -> None:
    """Ranks of 20 and 14 rows would have 4 and 3 chunks: all have 4."""
    wanted, other = alone(rows, 4, 0.5), alone(rows, 3, 0.5)
    assert off_by(other, wanted) > 1e-3  # the control
    for found in on_ranks(with_dropout, 2, rows, how):
        assert off_by(found, wanted) <= EXACT


def without_rest(rank: int, world_size: int) -> Any:
    options = {"reshard_after_forward": False}
    wanted = train(sharded("blocks", **options), rank, sgd, of=whole)
    model = sharded("blocks", **options)
    with Chunked(model.deep, size=6), mock.patch.object(_compat, "_rest"):
        return wanted, train(model, rank, sgd, of=whole)


def test_passes_within_a_backward_pass_need_a_fresh_state(on_ranks: OnRanks) -> None:
    """The control: FSDP2 takes the second chunk's pass as one of checkpointing."""
    for wanted, found in on_ranks(without_rest, 2):
        assert off_by(found, wanted) > 1e-2


def unseen(rank: int, world_size: int) -> str:
    model = sharded("blocks")
    with mock.patch.object(forward, "shards_within", return_value=None):
        Chunked(model.deep, size=6)
        with pytest.raises(TrainkitError) as error:
            train(model, rank, sgd)
    return str(error.value)


def test_sharded_parts_that_were_missed_are_refused(on_ranks: OnRanks) -> None:
    for text in on_ranks(unseen, 2):
        assert "would get no gradient" in text


class Counting(TorchDispatchMode):
    """Counts what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def counted(rank: int, world_size: int, reshards: bool, cut: bool) -> Any:
    model = sharded("blocks", reshard_after_forward=reshards)
    x, labels = data(rank, 0)
    chunks = Chunked(model.deep, size=5)
    if not cut:
        chunks.remove()
    whole_ones: list[int] = []
    ops = Counting()

    def note(*_: Any) -> None:
        lines = [block.line.weight for block in model.deep.blocks]
        whole_ones.append(sum(type(each) is nn.Parameter for each in lines))

    model.deep.last.register_forward_hook(note)
    for _ in range(4):
        whole_ones.clear()
        with (ops := Counting()):
            nt_xent(model(x), labels).backward()
    return ops.counts, whole_ones


@pytest.mark.parametrize(
    ("reshards", "cut", "gathers", "whole_in_backward"),
    [
        (True, False, 2 + 3 * 2, []),
        (False, False, 1 + 3, []),
        (True, True, 2 + 3 * 3 * 4, [0] * 4),
        (False, True, 1 + 3, [3] * 4),
    ],
)
def test_gradients_are_reduced_once_and_weights_are_as_whole_as_without_a_cut(
    reshards: bool,
    cut: bool,
    gathers: int,
    whole_in_backward: list[int],
    on_ranks: OnRanks,
) -> None:
    """Three blocks and the root, four chunks; a chunk runs twice."""
    for counts, whole_ones in on_ranks(counted, 2, reshards, cut):
        assert counts["_reduce_scatter_base_"] == 4
        assert counts["_allgather_base_"] == gathers
        assert whole_ones[5:] == whole_in_backward[1:]


def narrow(rank: int, world_size: int, trains_first: bool) -> Any:
    found = []
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    given: list[dict[str, Any]] = [{}, {"mp_policy": policy}]
    for options in given:
        x, labels = data(rank, 0, 32)
        for size in (None, 1):
            model = sharded("blocks", dtype=torch.float32, **options)
            if not trains_first:
                model.deep.first.requires_grad_(False)
            if size is not None:
                Chunked(model.deep, size=size)
            nt_xent(model(x.float()).float(), labels).backward()
            found.append(gradients(model))
    return found


@pytest.mark.parametrize("trains_first", [True, False])
def test_bfloat16_in_chunks_is_off_by_its_own_rounding(
    trains_first: bool, on_ranks: OnRanks
) -> None:
    for wanted, exact, rounded, found in on_ranks(narrow, 2, trains_first):
        assert off_by(exact, wanted) <= 1e-5
        assert off_by(found, wanted) <= 1.5 * off_by(rounded, wanted)
