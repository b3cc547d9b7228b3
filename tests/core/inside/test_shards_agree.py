"""Ranks whose weights FSDP2 shards within a cut module do alike, or refuse alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.checkpoint import checkpoint

from tests.core.conftest import OnRanks
from tests.core.inside.common import nt_xent, off_by
from tests.core.inside.test_sharded import (
    EXACT,
    Deep,
    Model,
    data,
    gradients,
    sgd,
    sharded,
    train,
)
from trainkit import Chunked, TrainkitError


class Tables(Deep):
    """It takes a table of 20 entries, which is as long as one rank's batch."""

    def forward(self, x: Tensor, table: Tensor | None = None) -> Tensor:
        if table is not None:
            x = x + table.mean(0) + len(table)
        return super().forward(x)


def tables(rank: int, world_size: int, reshards: bool) -> Any:
    """The first rank looks at more ways to cut the arguments than the second."""
    table = torch.linspace(-1, 1, 20 * 6).view(20, 6).double()
    results = []
    for size in (None, 6):
        torch.manual_seed(5)
        deep: Any = Tables().double()
        for block in deep.blocks:
            fully_shard(block, reshard_after_forward=reshards)
        fully_shard(deep, reshard_after_forward=reshards)
        if size is not None:
            Chunked(deep, size=size)
        for step in range(3):
            x, labels = data(rank, step, (20, 14)[rank])
            nt_xent(deep(x, table), labels).backward()
        results.append(gradients(deep))
    return results


@pytest.mark.parametrize("reshards", [True, False])
def test_ranks_that_probe_differently_do_not_wait_for_each_other(
    reshards: bool, on_ranks: OnRanks
) -> None:
    for wanted, found in on_ranks(tables, 2, reshards):
        assert off_by(found, wanted) <= EXACT


def small_and_large(rank: int, world_size: int, rows: tuple[int, int]) -> Any:
    model = sharded("blocks")
    plain = train(model, rank, sgd, rows=rows[rank])
    model = sharded("blocks")
    with Chunked(model.deep, size=8):
        return plain, train(model, rank, sgd, rows=rows[rank])


@pytest.mark.parametrize("rows", [(20, 7), (3, 24), (8, 5), (9, 8)], ids=str)
def test_ranks_with_unlike_rows_have_as_many_chunks(
    rows: tuple[int, int], on_ranks: OnRanks
) -> None:
    """Alone, a rank of 7 rows would have one chunk, and one of 20 rows three."""
    for wanted, found in on_ranks(small_and_large, 2, rows):
        assert off_by(found, wanted) <= EXACT


class FailsOnOne(Deep):
    """A forward that looks across rows, on one rank."""

    across = False

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out - out.mean(0) if self.across else out


def refused(rank: int, world_size: int, what: str) -> list[str]:
    texts = []

    def refuses(function: Any) -> None:
        with pytest.raises(TrainkitError) as error:
            function()
        texts.append(str(error.value))

    model = sharded("blocks")
    x, labels = data(rank, 0, (2, 20)[rank] if what == "few" else 20)
    cut = model.deep
    if what == "one fails":
        cut = FailsOnOne().double()
        for block in cut.blocks:
            fully_shard(block)
        cut.across = rank == 1
        model = cut
    given: dict[str, Any] = {
        "no size": {"size": None},
        "keep": {"size": 6, "keep": 2},
        "tokens": {"tokens": 64},
    }
    with Chunked(cut, **given.get(what, {"size": 6})):
        refuses(lambda: model(x))
        if what == "one fails":
            cut.across = False
            nt_xent(model(x), labels).backward()  # nothing is left in the way
    return texts


@pytest.mark.parametrize(
    ("what", "wanted"),
    [
        ("few", "one rank needs 4, and another has 2 rows"),
        ("no size", "Give a size"),
        ("keep", "keep=2 was given. Write keep=0"),
        ("tokens", "a budget of tokens gives each rank its own number"),
    ],
)
def test_what_ranks_cannot_do_alike_is_refused_on_all(
    what: str, wanted: str, on_ranks: OnRanks
) -> None:
    for texts in on_ranks(refused, 2, what):
        assert wanted in texts[0]


def test_a_rank_that_refuses_its_rows_leaves_no_other_waiting(
    on_ranks: OnRanks,
) -> None:
    other, own = on_ranks(refused, 2, "one fails")
    assert "another rank refused" in other[0]
    assert "depends on other rows" in own[0]


def spanning(rank: int, world_size: int) -> str:
    torch.manual_seed(5)
    model: Any = Model().double()
    fully_shard([model.deep.last, model.out])
    fully_shard(model)
    x, _ = data(rank, 0)
    with Chunked(model.deep, size=6), pytest.raises(TrainkitError) as error:
        model(x)
    return str(error.value)


def test_parts_gathered_with_others_are_refused(on_ranks: OnRanks) -> None:
    for text in on_ranks(spanning, 2):
        assert "together with modules that are not within it: FSDPLinear" in text


class Routed(Deep):
    """The second block is for some rows only, and does not run if there are none."""

    def forward(self, x: Tensor) -> Tensor:
        wants = x[:, :1] > 0
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            if index != 1:
                x = block(x)
            elif wants.any():
                x = torch.where(wants, block(x), x)
        return self.last(x)


def routed(rank: int, world_size: int, has_root: bool) -> Any:
    results = []
    for size in (None, 6):
        torch.manual_seed(5)
        deep: Any = Routed().double()
        for block in deep.blocks:
            fully_shard(block)
        if has_root:
            fully_shard(deep)
        if size is not None:
            Chunked(deep, size=size)
        x, labels = data(rank, 0)
        x[:, 0] = 1 - 2 * (torch.arange(len(x)) // 5 % 2)  # not in the last chunk
        nt_xent(deep(x), labels).backward()
        results.append(gradients(deep))
    return results


@pytest.mark.parametrize("has_root", [True, False])
def test_a_block_that_the_last_chunk_leaves_out_has_its_gradient(
    has_root: bool, on_ranks: OnRanks
) -> None:
    for wanted, found in on_ranks(routed, 2, has_root):
        assert off_by(found, wanted) <= EXACT


# ---- beside other things -------------------------------------------------------------


class Frozen(Deep):
    """With a checkpoint around each block, and a first layer that does not train."""

    reentrant: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)  # type: ignore[assignment]
        return self.last(x)


def beside(rank: int, world_size: int, what: str) -> Any:
    results = []
    for size in (None, 6):
        torch.manual_seed(5)
        deep: Any = Frozen().double()
        options: dict[str, Any] = {}
        if what in ("replicate", "shard"):
            shape = (2, 1) if what == "replicate" else (1, 2)
            options["mesh"] = init_device_mesh(
                "cpu", shape, mesh_dim_names=("replicate", "shard")
            )
        if what in ("reentrant", "checkpoint"):
            deep.reentrant = what == "reentrant"
        if what == "frozen":
            deep.first.requires_grad_(False)
            deep.blocks[1].requires_grad_(False)
        if what == "only blocks train":
            deep.first.requires_grad_(False)
            deep.last.requires_grad_(False)
        for block in deep.blocks:
            fully_shard(block, **options)
        fully_shard(deep, **options)
        if size is not None:
            Chunked(deep, size=size)
        rows = 4 if what == "micro-batches" else 1
        for number in range(rows):
            x, labels = data(rank, number)
            x.requires_grad_(what == "inputs")
            deep.set_requires_gradient_sync(number == rows - 1)
            nt_xent(deep(x), labels).backward()
            if x.grad is not None:
                results.append(x.grad)
        results.append(gradients(deep))
    return results


@pytest.mark.parametrize(
    "what",
    [
        "inputs",
        "replicate",
        "shard",
        "reentrant",
        "checkpoint",
        "frozen",
        "only blocks train",
        "micro-batches",
    ],
)
def test_beside_it_all_works_as_for_the_whole_batch(
    what: str, on_ranks: OnRanks
) -> None:
    for results in on_ranks(beside, 2, what):
        half = len(results) // 2
        for wanted, found in zip(results[:half], results[half:], strict=True):
            assert off_by(found, wanted) <= EXACT


# ---- the first FSDP ------------------------------------------------------------------


def flat(rank: int, world_size: int, where: str, originals: bool) -> str:
    model: Any = Model().double()
    wrap = FullyShardedDataParallel
    options = {"use_orig_params": originals, "device_id": torch.device("cpu")}
    cut = model.deep
    if where == "around":
        model = wrap(model, **options)
    elif where == "at":
        cut = model.deep = wrap(model.deep, **options)
    elif where == "right around":
        model.deep = wrap(model.deep, **options)
    else:
        cut.blocks[1] = wrap(cut.blocks[1], **options)
    x, _ = data(rank, 0)
    with pytest.raises(TrainkitError) as error, Chunked(cut, size=6):
        model(x)
    return str(error.value)


@pytest.mark.parametrize("originals", [True, False])
@pytest.mark.parametrize("where", ["around", "right around", "at", "within"])
def test_the_first_fsdp_is_refused(
    where: str, originals: bool, on_ranks: OnRanks
) -> None:
    for text in on_ranks(flat, 2, where, originals):
        assert "FullyShardedDataParallel flattens weights" in text
        assert "fully_shard" in text
