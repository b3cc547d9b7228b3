"""Rows dealt to ranks: each once, and as many batches on every rank."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler

from tests.data.sharing import Batches, fillers, rank_of, read_by_all, real_rows
from trainkit import TrainkitError
from trainkit.data.row_sampler import Last, RowSampler, check_last

CASES: dict[str, Any] = {
    "number": st.integers(1, 50),
    "batch_size": st.integers(1, 7),
    "num_ranks": st.integers(1, 4),
    "seed": st.integers(-5, 2**40),
    "epoch": st.integers(0, 4),
}


class Batched:
    """The sampler as a loader uses it."""

    def __init__(self, sampler: RowSampler) -> None:
        self.sampler = sampler
        self._batches = BatchSampler(sampler, sampler.batch_size, drop_last=False)

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def __setattr__(self, name: str, value: Any) -> None:
        owner = self.sampler if name == "start" else self
        object.__setattr__(owner, name, value)

    def __iter__(self) -> Any:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def read(
    number: int,
    batch_size: int,
    num_ranks: int,
    *,
    last: Last = "weight",
    fills: bool = True,
    seed: int = 0,
    epoch: int = 0,
    start: int = 0,
) -> list[Batches]:
    def make() -> Batched:
        sampler = RowSampler(
            range(number), batch_size=batch_size, shuffle=True, seed=seed, last=last
        )
        sampler.fills = fills
        sampler._has_warned = True
        return Batched(sampler)

    return read_by_all(make, num_ranks, epoch=epoch, start=start)


@pytest.mark.parametrize("last", ["weight", "pad"])
@given(**CASES)
@settings(max_examples=100, deadline=None)
def test_each_row_is_read_once_and_ranks_have_as_many_batches(
    last: Last, number: int, batch_size: int, num_ranks: int, seed: int, epoch: int
) -> None:
    shares = read(number, batch_size, num_ranks, last=last, seed=seed, epoch=epoch)
    assert real_rows(shares) == list(range(number))
    num_rounds = -(-number // (batch_size * num_ranks))
    assert all(len(batches) == num_rounds for batches in shares)
    left = number % (batch_size * num_ranks)
    lacking = (batch_size * num_ranks if last == "pad" else num_ranks) - left
    assert fillers(shares) == (max(lacking, 0) if left else 0)
    with rank_of(0, num_ranks):
        sampler = RowSampler(
            range(number), batch_size=batch_size, shuffle=False, seed=0, last=last
        )
        assert not sampler.gives_fillers
        sampler.fills = True
        assert sampler.gives_fillers == (fillers(shares) > 0)
    if last == "pad":
        assert {len(b) for batches in shares for b in batches} == {batch_size}


@given(**CASES)
@settings(max_examples=100, deadline=None)
def test_drop_leaves_out_what_is_no_full_round(
    number: int, batch_size: int, num_ranks: int, seed: int, epoch: int
) -> None:
    if number < batch_size * num_ranks:
        with pytest.raises(TrainkitError, match="give not one batch"):
            read(number, batch_size, num_ranks, last="drop")
        return
    shares = read(number, batch_size, num_ranks, last="drop", seed=seed, epoch=epoch)
    rows = real_rows(shares)
    assert len(rows) == len(set(rows)) == number - number % (batch_size * num_ranks)
    assert {len(b) for batches in shares for b in batches} == {batch_size}


@given(last=st.sampled_from(["weight", "pad"]), rounds=st.integers(0, 9), **CASES)
@settings(max_examples=60, deadline=None)
def test_resumed_epoch_is_the_rest(
    last: Last,
    rounds: int,
    number: int,
    batch_size: int,
    num_ranks: int,
    seed: int,
    epoch: int,
) -> None:
    how: dict[str, Any] = {"last": last, "seed": seed, "epoch": epoch}
    whole = read(number, batch_size, num_ranks, **how)
    start = min(rounds * batch_size * num_ranks, number)
    rest = read(number, batch_size, num_ranks, start=start, **how)
    assert rest == [batches[rounds:] for batches in whole]


def test_without_fillers_rows_that_do_not_go_round_are_left_out() -> None:
    assert len(real_rows(read(25, 4, 3, fills=False))) == 24
    assert len(real_rows(read(25, 4, 3))) == 25
    assert len(real_rows(read(27, 4, 3, fills=False))) == 27


def test_torchs_sampler_reads_rows_twice() -> None:
    """Negative control: the rows with which it makes ranks even count twice."""
    shares = [
        list(DistributedSampler(range(25), num_replicas=3, rank=r))  # type: ignore[arg-type]
        for r in range(3)
    ]
    rows = [row for share in shares for row in share]
    assert len(rows) == 27
    assert len(set(rows)) == 25


def test_no_row_for_all_ranks_is_refused_and_says_the_remedy() -> None:
    with pytest.raises(TrainkitError, match="fewer ranks, or give weigh_nothing="):
        read(2, 4, 3, fills=False)
    assert real_rows(read(2, 4, 3)) == [0, 1]


@pytest.mark.parametrize(
    ("last", "text"),
    [
        ("keep", "last: must be one of weight, pad, drop, received 'keep'"),
        ("pad", r"last='pad': needs weigh_nothing=.*\.WeighNothing\(labels=-100\)"),
    ],
)
def test_remedies_are_checked(last: str, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        check_last(last, None, drop_last=False)


def test_two_remedies_at_once_are_refused() -> None:
    with pytest.raises(TrainkitError, match="'pad': cannot go with drop_last=True"):
        check_last("pad", abs, drop_last=True)


def test_rank_is_looked_up_when_rows_are_read() -> None:
    sampler = RowSampler(range(8), batch_size=2, shuffle=False, seed=0)
    with rank_of(1, 2):
        assert list(sampler) == [2, 3, 6, 7]
    assert list(sampler) == list(range(8))
