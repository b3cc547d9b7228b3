"""Batch samplers that know the lengths of rows: their base, and the plainer one."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from trainkit.core.plan.options import check_whole_number
from trainkit.data.filler import Filler
from trainkit.data.lengths import checked_lengths
from trainkit.data.row_sampler import EpochOrder
from trainkit.errors import TrainkitError

Batch = list[int]


class LengthSampler(EpochOrder):
    """A batch sampler that uses the lengths of rows.

    The number of ranks does not change the epoch's batches. In each round every rank is
    given one batch, so all ranks have equally many; a position counts rounds. If
    batches are lacking in the last round, some of its batches are split, so that every
    row is read once.

    In a loop of your own give it to a `DataLoader` as `batch_sampler`, and call
    `set_epoch` before each epoch; with Lightning give it to a `ResumableLoader`.
    """

    def __init__(
        self,
        lengths: Iterable[int] | Tensor | str | os.PathLike[str],
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        process_group: Any,
    ) -> None:
        self.lengths = checked_lengths(type(self).__name__, lengths)
        super().__init__(
            self.lengths, shuffle=shuffle, seed=seed, process_group=process_group
        )
        self.leaves_out_last = bool(drop_last)

    @property
    def sampler(self) -> LengthSampler:
        """Itself: Lightning calls `set_epoch` on what it finds here."""
        return self

    @property
    @abstractmethod
    def num_batches(self) -> int:
        """How many batches every epoch has, over all ranks, before any are split."""

    @abstractmethod
    def batches(self) -> list[Batch]:
        """The batches of this epoch, over all ranks, before any are split."""

    @property
    def end(self) -> int:
        return len(self)

    @property
    def gives_fillers(self) -> bool:
        return self.fills and len(self) * self.ranks[1] > self.num_rows

    def after(self, position: int) -> int:
        return position + 1

    def described(self) -> dict[str, Any]:
        return {
            "dataset": len(self.lengths),
            "sum of lengths": sum(self.lengths),
            "drop_last": self.leaves_out_last,
            "ranks": self.ranks[1],
            **super().described(),
        }

    def __len__(self) -> int:
        """How many batches each rank is given in an epoch."""
        full, left = divmod(self.num_batches, self.ranks[1])
        return full + bool(left and not self.leaves_out_last)

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        """This rank's batches, from the position `start` on."""
        rank, _ = self.ranks
        return (batches[rank] for batches in self.rounds(self.start))

    def rounds(self, start: int) -> Iterator[list[Batch]]:
        """The epoch's rounds from one on, each with a batch for each rank."""
        num_ranks, batches = self.ranks[1], self.batches()
        end = len(self) * num_ranks
        if batches and not self.leaves_out_last:
            batches = part(batches, end, first=end - num_ranks)
            if lacking := end - len(batches):
                batches += self._fillers(
                    lacking, f"{self.num_rows} rows do not make {end} batches"
                )
        for first in range(start * num_ranks, end, num_ranks):
            yield batches[first : first + num_ranks]

    def _fillers(self, number: int, why: str) -> list[Batch]:
        """So many batches of a row that weighs nothing, if that may be."""
        if not self.fills:
            raise TrainkitError(
                f"{type(self).__name__}: every rank must have a row in every batch, "
                f"and {why} for {self.ranks[1]} ranks. Use fewer ranks or "
                f"drop_last=True, or give the ResumableLoader weigh_nothing=."
            )
        return [[Filler(0)] for _ in range(number)]

    def _refuse_longer(self, tokens: int) -> None:
        """Refuse a row that does not fit in a batch."""
        longest = max(self.lengths, default=0)
        if longest > tokens:
            raise TrainkitError(
                f"{type(self).__name__} tokens: must hold the longest row, received "
                f"{tokens:,}, and row {self.lengths.index(longest)} has {longest:,}. "
                f"Raise it, or shorten the row."
            )


class LengthGroupedSampler(LengthSampler):
    """Makes batches of `batch_size` rows with similar lengths.

    An epoch's rows are shuffled and divided into pools of `pool` batches. Each pool is
    sorted by length and cut into batches, and the batches are shuffled. A larger pool
    means less padding, but also less chance in which rows meet.

    Args:
        lengths: the lengths of the rows, in order, or a file of them.
        batch_size: rows in a batch.
        pool: how many batches are cut from rows that are sorted together.
        shuffle: whether each epoch has its own order; if not, all rows are sorted, the
            longest first.
        seed: the seed of the orders.
        drop_last: leave out a batch that is not full, and batches that do not make a
            round of all ranks.
        process_group: the ranks that share the rows; default: all.
    """

    def __init__(
        self,
        lengths: Iterable[int] | Tensor | str | os.PathLike[str],
        *,
        batch_size: int,
        pool: int = 50,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        process_group: Any = None,
    ) -> None:
        check_whole_number("LengthGroupedSampler batch_size", batch_size)
        check_whole_number("LengthGroupedSampler pool", pool)
        super().__init__(
            lengths,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            process_group=process_group,
        )
        # Not named batch_size: for overfit_batches Lightning would copy the sampler.
        self.rows_each, self.pool = batch_size, pool

    @property
    def num_batches(self) -> int:
        full, left = divmod(len(self.lengths), self.rows_each)
        return full + bool(left and not self.leaves_out_last)

    def described(self) -> dict[str, Any]:
        own = {"batch_size": self.rows_each, "pool": self.pool}
        return {**own, **super().described()}

    def batches(self) -> list[Batch]:
        rows = self.permuted(len(self.lengths))[: self.num_batches * self.rows_each]
        together = self.pool * self.rows_each if self.shuffle else len(rows)
        found: list[Batch] = []
        for start in range(0, len(rows), max(together, 1)):
            pool = rows[start : start + together]
            pool.sort(key=lambda row: -self.lengths[row])
            found += [
                pool[at : at + self.rows_each]
                for at in range(0, len(pool), self.rows_each)
            ]
        return [found[n] for n in self.permuted(len(found), 1)]


def part(batches: Sequence[Batch], number: int, *, first: int) -> list[Batch]:
    """Split batches in two, the largest first, until there are `number` of them.

    >>> part([[0, 1], [2, 3, 4, 5]], 4, first=1)
    [[0, 1], [2], [3], [4, 5]]
    >>> part([[0, 1], [2]], 3, first=1)  # a single row cannot be split
    [[0], [2], [1]]

    Args:
        batches: lists of rows.
        number: how many batches to return; fewer, if there are too few rows.
        first: the index of the first batch that may be split. Earlier batches only give
            single rows away, once nothing else can be split.
    """
    before, parted = [list(b) for b in batches[:first]], [*map(list, batches[first:])]
    while len(before) + len(parted) < number:
        largest = max(parted, key=len)
        if len(largest) > 1:
            place, half = parted.index(largest), len(largest) // 2
            parted[place : place + 1] = [largest[:half], largest[half:]]
            continue
        donor = max(before, key=len, default=[])
        if len(donor) < 2:
            break
        parted.append([donor.pop()])
    return before + parted
