"""Fillers weigh nothing: ranks that read them give the big batch's gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tests.data.sharing import rank_of
from tests.helpers import (
    NAIVE,
    TOLERANCE,
    TokenNet,
    deviation,
    ragged_sequences,
    raise_rank_errors,
    run_ranks,
    start_gloo,
    token_loss,
    weights,
)
from trainkit import (
    Accumulator,
    LengthGroupedSampler,
    PadCollate,
    PerToken,
    ResumableLoader,
    TokenBudgetSampler,
    TrainkitError,
    WeighNothing,
)
from trainkit.data.filler import Filled, Filler

WORLD_SIZE = 3
PAD = PadCollate({"labels": -100})
NOTHING = WeighNothing(labels=-100)


def sequences(number: int) -> list[dict[str, torch.Tensor]]:
    return [{"ids": x, "labels": y} for x, y in ragged_sequences(number)]


def net() -> TokenNet:
    return TokenNet(dtype=torch.float64)


# ---- the law -------------------------------------------------------------------------

NUMBER = 13
"""In batches of 2 on three ranks one row is left, for the first of them."""

LOADERS: dict[str, Callable[[Any], DataLoader[Any]]] = {
    "weight": lambda rows: ResumableLoader(
        rows, 2, collate_fn=PAD, weigh_nothing=NOTHING
    ),
    "pad": lambda rows: ResumableLoader(
        rows, 2, collate_fn=PAD, weigh_nothing=NOTHING, last="pad"
    ),
    "length grouped": lambda rows: ResumableLoader(
        rows,
        batch_sampler=LengthGroupedSampler(lengths(rows), batch_size=2),
        collate_fn=PAD,
    ),
    "token budget": lambda rows: ResumableLoader(
        rows,
        batch_sampler=TokenBudgetSampler(lengths(rows), tokens=20),
        collate_fn=PAD,
        weigh_nothing=NOTHING,
    ),
    "rows repeated": lambda rows: DataLoader(
        rows, 2, sampler=DistributedSampler(rows, shuffle=False), collate_fn=PAD
    ),
}


def lengths(rows: list[dict[str, torch.Tensor]]) -> list[int]:
    return [len(row["ids"]) for row in rows]


def train_on_ranks(rank: int, world_size: int) -> dict[str, Any]:
    """For each loader, an epoch as one window of DDP."""
    start_gloo()
    return {name: _train(loader(sequences(NUMBER))) for name, loader in LOADERS.items()}


def _train(loader: DataLoader[Any]) -> torch.Tensor:
    trained = DDP(net())
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
    accumulator = Accumulator(PerToken(), module=trained)
    for batch in loader:
        accumulator.backward(token_loss(trained, batch), batch)
    accumulator.finish(optimizer)
    optimizer.step()
    return weights(trained)


def train_on_big_batch() -> torch.Tensor:
    trained = net()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
    token_loss(trained, PAD(sequences(NUMBER))).backward()
    optimizer.step()
    return weights(trained)


def test_ranks_equal_the_big_batch() -> None:
    """Rows that are repeated to make ranks even, as torch's sampler does it, which
    Lightning takes, count twice."""
    found = raise_rank_errors(run_ranks(train_on_ranks, WORLD_SIZE))[0]
    big = train_on_big_batch()
    off = {name: deviation(trained, big, net()) for name, trained in found.items()}
    assert off.pop("rows repeated") > NAIVE
    assert max(off.values()) < TOLERANCE[torch.float64]


# ---- rows that weigh nothing ---------------------------------------------------------


class AtOnce(Dataset[Any]):
    """Rows that are read as a batch, as those of Hugging Face's datasets are."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return 5

    def __getitem__(self, row: int) -> Any:
        raise AssertionError("one by one")

    def __getitems__(self, rows: list[int]) -> list[Any]:
        self.asked.append(rows)
        return [{"x": row, "weight": 1.0} for row in rows]


def test_rows_are_read_at_once_where_the_dataset_can() -> None:
    rows = AtOnce()
    loader = ResumableLoader(rows, 2, last="pad", weigh_nothing=WeighNothing(weight=0))
    assert [b["weight"].tolist() for b in loader] == [[1, 1], [1, 1], [1, 0]]
    assert rows.asked == [[0, 1], [2, 3], [4, 4]]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_fillers_reach_workers_as_such(num_workers: int) -> None:
    loader = ResumableLoader(
        sequences(3),
        2,
        last="pad",
        weigh_nothing=NOTHING,
        collate_fn=PAD,
        num_workers=num_workers,
    )
    real, last = [batch["labels"] for batch in loader]
    assert (real != -100).any(dim=1).all()
    assert (last != -100).any(dim=1).tolist() == [True, False]


def test_state_is_that_of_the_rows_alone() -> None:
    """Whether places are filled is no part of how far the epoch has come."""
    rows = list(range(10))
    first = ResumableLoader(rows, 4, weigh_nothing=lambda row: -1, last="pad")
    next(iter(first))
    second = ResumableLoader(rows, 4)
    second.load_state_dict(first.state_dict())
    assert [b.tolist() for b in second] == [[4, 5, 6, 7], [8, 9]]


def test_values_of_every_kind() -> None:
    row = {"a": torch.ones(2), "b": [3, 4], "c": (5,), "d": 6.0, "e": True, "f": 1}
    nothing = WeighNothing(a=0, b=-100, c=-1, d=0, e=0)(row)
    assert nothing["a"].tolist() == [0, 0]
    assert {k: v for k, v in nothing.items() if k != "a"} == {
        "b": [-100, -100],
        "c": (-1,),
        "d": 0.0,
        "e": False,
        "f": 1,
    }
    assert row["b"] == [3, 4], "the row itself stays as it is"


class Pair(NamedTuple):
    first: Any
    second: Any


def test_lists_of_lists_and_named_tuples_keep_their_form() -> None:
    row = {"a": [[1, 2], [3]], "b": Pair(torch.ones(2), 5)}
    nothing = WeighNothing(a=-100, b=0)(row)
    assert nothing["a"] == [[-100, -100], [-100]]
    assert isinstance(nothing["b"], Pair)
    assert (nothing["b"].first.tolist(), nothing["b"].second) == ([0, 0], 0)


def test_array_becomes_an_array_of_its_type() -> None:
    array = torch.ones(3, dtype=torch.int16).numpy()
    nothing = WeighNothing(y=-100)({"y": array})["y"]
    assert (nothing.tolist(), nothing.dtype) == ([-100] * 3, array.dtype)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: WeighNothing(), "needs at least one field and its value"),
        (
            lambda: NOTHING((1, 2)),
            "rows must be mappings, received tuple.* of your own",
        ),
        (lambda: NOTHING({"x": 1}), "labels: must be a field .* received a row of x"),
        (lambda: NOTHING({"labels": "text"}), "labels: must be a tensor, .* str"),
        (lambda: NOTHING({"labels": ["text"]}), "labels: must be a tensor, .* str"),
        # Each would become a label that counts: 156, True, 0.
        (
            lambda: NOTHING({"labels": torch.ones(2, dtype=torch.uint8)}),
            r"labels: must be .* torch\.uint8, received -100: .* could weigh",
        ),
        (
            lambda: NOTHING({"labels": torch.ones(2, dtype=torch.uint8).numpy()}),
            r"must be a value of the field's type, torch\.uint8, received -100",
        ),
        (lambda: NOTHING({"labels": True}), r"torch\.bool, received -100"),
        (lambda: WeighNothing(labels=0.5)({"labels": 3}), "torch.int64, received 0.5"),
    ],
)
def test_odd_rows_are_refused(make: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        make()


def test_filler_is_an_index_like_any_other() -> None:
    rows = Filled(["a", "b"], str.upper)
    assert (rows[1], rows[Filler(1)], len(rows)) == ("b", "B", 2)


def test_loader_made_anew_fills_once() -> None:
    """Lightning makes loaders anew from their own dataset."""
    first = ResumableLoader([1, 2, 3], 2, last="pad", weigh_nothing=lambda row: -row)
    again = ResumableLoader(
        first.dataset, 2, last="pad", weigh_nothing=lambda row: -row
    )
    assert [b.tolist() for b in again] == [[1, 2], [3, -3]]


def test_ranks_without_a_row_read_one_filler() -> None:
    for rank, last in enumerate([[4], [-4]]):
        with rank_of(rank, 2):
            loader = ResumableLoader(list(range(5)), 2, weigh_nothing=lambda row: -row)
            assert len(loader) == 2
            assert [b.tolist() for b in loader][-1] == last
