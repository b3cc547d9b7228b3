"""What all ranks together read of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from trainkit.data.filler import Filler
from trainkit.data.row_sampler import EpochOrder

Batches = list[list[int]]


@contextmanager
def rank_of(rank: int, num_ranks: int) -> Iterator[None]:
    """Samplers believe that they are on this rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EpochOrder, "ranks", (rank, num_ranks))
        yield


def read_by_all(
    make: Callable[[], Any], num_ranks: int, *, epoch: int = 0, start: int = 0
) -> list[Batches]:
    """The batches of each rank, and that every rank was told the right number.

    Args:
        make: returns a batch sampler, with ours as its `sampler`.
        num_ranks: how many ranks read.
        epoch: what the sampler is told.
        start: the position from which all begin.
    """
    shares = []
    for rank in range(num_ranks):
        with rank_of(rank, num_ranks):
            batches = make()
            batches.sampler.set_epoch(epoch)
            batches.sampler.start = start
            shares.append([list(batch) for batch in batches])
            assert start or len(shares[-1]) == len(batches)
    assert len({len(batches) for batches in shares}) == 1
    return shares


def real_rows(shares: list[Batches]) -> list[int]:
    """All rows that were read and are no fillers, in order of their numbers."""
    rows = (row for batches in shares for batch in batches for row in batch)
    return sorted(row for row in rows if not isinstance(row, Filler))


def fillers(shares: list[Batches]) -> int:
    """How many places were filled."""
    rows = (row for batches in shares for batch in batches for row in batch)
    return sum(isinstance(row, Filler) for row in rows)
