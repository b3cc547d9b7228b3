"""Fillers weigh nothing: ranks that read them give the big batch's gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from tests.core.split.common import Pair
from tests.data.sharing import rank_of
from tests.helpers import (
    NAIVE,
    TOLERANCE,
    TokenModule,
    TokenNet,
    deviation,
    ragged_sequences,
    raise_rank_errors,
    run_ranks,
    start_gloo,
    token_loss,
    train_on_windows,
    weights,
)
from trainkit import (
    Accumulator,
    PadCollate,
    PerToken,
    ResumableLoader,
    TokenBudgetSampler,
    TrainkitError,
    WeighNothing,
)

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

LAW: Any = sequences(NUMBER)
LENGTHS = [len(row["ids"]) for row in LAW]
budget = partial(TokenBudgetSampler, LENGTHS, tokens=20)
repeating = partial(DistributedSampler, LAW, shuffle=False)
LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "rows": lambda: loader(2, weigh_nothing=NOTHING),
    "token budget": lambda: loader(batch_sampler=budget(), weigh_nothing=NOTHING),
    "rows repeated": lambda: DataLoader(LAW, 2, sampler=repeating(), collate_fn=PAD),
}


def loader(*args: Any, **how: Any) -> ResumableLoader:
    return ResumableLoader(LAW, *args, collate_fn=PAD, **how)


def train_on_ranks(rank: int, world_size: int) -> dict[str, Any]:
    """For each loader, an epoch as one window of DDP."""
    start_gloo()
    return {name: _train(make()) for name, make in LOADERS.items()}


def _train(loader: DataLoader[Any]) -> torch.Tensor:
    trained = DDP(net())
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
    accumulator = Accumulator(PerToken(), module=trained)
    for batch in loader:
        accumulator.backward(token_loss(trained, batch), batch)
    accumulator.finish(optimizer)
    optimizer.step()
    return weights(trained)


def test_ranks_equal_the_big_batch() -> None:
    """Rows that are repeated to make ranks even, as torch's sampler does it, which
    Lightning takes, count twice."""
    found = raise_rank_errors(run_ranks(train_on_ranks, WORLD_SIZE))[0]
    window = [(row["ids"], row["labels"]) for row in LAW]
    module = TokenModule(dtype=torch.float64)  # by SGD, with the same rate
    big = weights(train_on_windows(module, [window], epochs=1))
    off = {name: deviation(trained, big, net()) for name, trained in found.items()}
    assert off.pop("rows repeated") > NAIVE
    assert max(off.values()) < TOLERANCE[torch.float64]


# ---- rows that weigh nothing ---------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1])
def test_fillers_reach_workers_as_such(num_workers: int) -> None:
    """Also where rows are read as a batch, as those of Hugging Face's datasets are; and
    in a loader that Lightning makes anew from the dataset of this one."""

    class AtOnce(list[Any]):
        def __getitem__(self, row: Any) -> Any:
            raise AssertionError("one by one")

        def __getitems__(self, rows: list[int]) -> list[Any]:
            return [list.__getitem__(self, row) for row in rows]

    how: Any = {"weigh_nothing": NOTHING, "collate_fn": PAD}
    for rows in (sequences(5), AtOnce(sequences(5))):
        loader = ResumableLoader(rows, 2, num_workers=num_workers, **how)
        for each in (loader, ResumableLoader(loader.dataset, 2, **how)):
            with rank_of(1, 2):
                real, last = [batch["labels"] for batch in each]
            assert (real != -100).any(dim=1).all()
            assert (last == -100).all()


ARRAY = torch.ones(3, dtype=torch.int16).numpy()


@pytest.mark.parametrize(
    ("old", "value", "new"),
    [
        ([3, 4], -100, [-100, -100]),
        ((5,), -1, (-1,)),
        (6.0, 0, 0.0),
        (True, 0, False),
        ([[1, 2], [3]], -100, [[-100, -100], [-100]]),
        (Pair([1], 5), 0, Pair([0], 0)),  # type: ignore[arg-type]
    ],
)
def test_values_keep_their_form(old: Any, value: float, new: Any) -> None:
    row = {"x": old, "other": 1}
    nothing = WeighNothing(x=value)(row)
    assert nothing == {"x": new, "other": 1}
    assert type(nothing["x"]) is type(new)
    assert row["x"] is old, "the row itself stays as it is"


def test_tensors_and_arrays_keep_their_type() -> None:
    found = WeighNothing(y=0)({"y": np.bool_(True)})["y"]
    assert (bool(found), type(found)) == (False, np.bool_)
    for old in (ARRAY, torch.from_numpy(ARRAY)):
        nothing = WeighNothing(y=-100)({"y": old})["y"]
        assert (nothing.tolist(), nothing.dtype) == ([-100] * 3, old.dtype)


BYTES = torch.ones(2, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ((1, 2), "rows must be mappings, received tuple.* of your own"),
        ({"x": 1}, "labels: must be a field .* received a row of x"),
        ({"labels": "text"}, "labels: must be a tensor, .* str"),
        ({"labels": ["text"]}, "labels: must be a tensor, .* str"),
        # Each would become a label that counts: 156 or True.
        ({"labels": BYTES}, r"labels: .* torch\.uint8, received -100: .* could weigh"),
        ({"labels": BYTES.numpy()}, r"the field's type, torch\.uint8, received -100"),
        ({"labels": True}, r"torch\.bool, received -100"),
    ],
)
def test_odd_rows_are_refused(row: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        NOTHING(row)
    with pytest.raises(TrainkitError, match="needs at least one field and its value"):
        WeighNothing()
    with pytest.raises(TrainkitError, match="torch.int64, received 0.5"):
        WeighNothing(labels=0.5)({"labels": 3})


def test_state_is_that_of_the_rows_alone() -> None:
    """Whether places are filled is no part of how far the epoch has come."""
    rows = list(range(10))
    first = ResumableLoader(rows, 4, weigh_nothing=lambda row: -1)
    next(iter(first))
    second = ResumableLoader(rows, 4)
    second.load_state_dict(first.state_dict())
    assert [b.tolist() for b in second] == [[4, 5, 6, 7], [8, 9]]


def test_ranks_without_a_row_read_one_filler() -> None:
    for rank, last in enumerate([[4], [-4]]):
        with rank_of(rank, 2):
            loader = ResumableLoader(list(range(5)), 2, weigh_nothing=lambda row: -row)
            assert len(loader) == 2
            assert [b.tolist() for b in loader][-1] == last
