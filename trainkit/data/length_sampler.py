"""Lengths of rows, and batch samplers that know them: by rows, or by tokens."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from trainkit.core.plan.options import check_kind, check_whole_number
from trainkit.data.filler import Filler
from trainkit.data.row_sampler import EpochOrder, share
from trainkit.errors import TrainkitError

Batch = list[int]

SPREAD = 1.1
"""The longest row of a bucket may be this many times as long as its shortest row."""


def checked_lengths(
    name: str, lengths: Iterable[int] | Tensor | str | os.PathLike[str]
) -> list[int]:
    """The lengths as a list; refuse what is not the length of a row.

    Args:
        name: of the sampler that they are for.
        lengths: numbers, or the path of a file that `write_lengths` has written.
    """
    if isinstance(lengths, str | os.PathLike):
        lengths = _read(name, Path(lengths))
    given: Any = lengths
    given = given.tolist() if hasattr(given, "tolist") else given
    what = "a number for each row, or a file of them"
    check_kind(f"{name} lengths", given, Iterable, what)
    found = list(given)
    for row, length in enumerate(found):
        is_whole = isinstance(length, Integral) and not isinstance(length, bool)
        if not is_whole or length < 1:
            raise TrainkitError(
                f"{name} lengths: must be whole numbers of at least 1, received "
                f"{length!r} for row {row}. Leave empty rows out of the data."
            )
    # numpy's integers in a checkpoint would prevent loading it with weights_only.
    return [int(length) for length in found]


def write_lengths(path: str | os.PathLike[str], lengths: Iterable[int]) -> None:
    """Write lengths to a file, completely or not at all."""
    target = Path(path)
    part = target.with_name(target.name + ".part")
    with part.open("wb") as file:
        np.save(file, np.fromiter(lengths, dtype=np.int64))
    os.replace(part, target)


def _read(name: str, path: Path) -> Any:
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise TrainkitError(
            f"{name} lengths: must be numbers, or a file of them that `trainkit "
            f"lengths` has written, received {str(path)!r} ({error})."
        ) from None


class LengthSampler(EpochOrder):
    """A batch sampler that uses the lengths of rows.

    In each round every rank is given one batch, so all ranks have equally many.

    In a loop of your own give it to a `DataLoader` as `batch_sampler`, and call
    `set_epoch` before each epoch; with Lightning give it to a `ResumableLoader`.
    """

    def __init__(
        self,
        lengths: Iterable[int] | Tensor | str | os.PathLike[str],
        *,
        tokens: int,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        process_group: Any,
    ) -> None:
        name = type(self).__name__
        check_whole_number(f"{name} tokens", tokens)
        self.lengths = checked_lengths(name, lengths)
        super().__init__(
            self.lengths, shuffle=shuffle, seed=seed, process_group=process_group
        )
        self.tokens, self.leaves_out_last = tokens, bool(drop_last)
        longest = max(self.lengths, default=0)
        if longest > tokens:
            raise TrainkitError(
                f"{name} tokens: must hold the longest row, received {tokens:,}, and "
                f"row {self.lengths.index(longest)} has {longest:,}. Raise it, or "
                f"shorten the row."
            )

    @property
    def sampler(self) -> LengthSampler:
        """Itself: Lightning calls `set_epoch` on what it finds here."""
        return self

    @abstractmethod
    def rounds(self, start: int) -> Iterator[list[Batch]]:
        """The epoch's rounds from one on, each with a batch for each rank."""

    @property
    def end(self) -> int:
        return len(self)

    def described(self) -> dict[str, Any]:
        return {
            "dataset": len(self.lengths),
            "sum of lengths": sum(self.lengths),
            "drop_last": self.leaves_out_last,
            **super().described(),
        }

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        """This rank's batches, from the position `start` on."""
        rank, _ = self.ranks
        return (batches[rank] for batches in self.rounds(self.start))

    def _fillers(self, number: int, why: str) -> list[Batch]:
        """So many batches of a row that weighs nothing, if that may be."""
        if not self.fills:
            raise TrainkitError(
                f"{type(self).__name__}: every rank must have a row in every batch, "
                f"and {why} for {self.ranks[1]} ranks. Use fewer ranks or "
                f"drop_last=True, or give the ResumableLoader weigh_nothing=."
            )
        return [[Filler(0)] for _ in range(number)]


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


class TokenBudgetSampler(LengthSampler):
    """Cuts an epoch into batches of at most so many tokens, padding included.

        rows = ResumableLoader(
            dataset, batch_sampler=TokenBudgetSampler(lengths, tokens=4096, seed=1)
        )

    Rows with similar lengths make a bucket, and batches are cut from buckets. Which
    rows meet in a batch is drawn anew in each epoch. The number of batches is fixed, so
    that a Trainer's count of them stays right, and the number of ranks does not change
    them. If batches are lacking in the last round, some of its batches are split, so
    that every row is read once.

    Such batches have similar numbers of tokens, but not equal ones. Weigh them by
    `PerToken`; otherwise a row counts less in a batch of many rows.

    Args:
        lengths: the lengths of the rows, in order, or a file of them.
        tokens: the most tokens in a batch: its rows times its longest row.
        size: the most rows in a batch.
        shuffle: whether each epoch has its own order; if not, the longest batches come
            first.
        seed: the seed of the orders.
        drop_last: leave out batches that do not make a round of all ranks.
        process_group: the ranks that share the rows; default: all.
    """

    def __init__(
        self,
        lengths: Iterable[int] | Tensor | str | os.PathLike[str],
        *,
        tokens: int,
        size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        process_group: Any = None,
    ) -> None:
        if size is not None:
            check_whole_number("TokenBudgetSampler size", size)
        super().__init__(
            lengths,
            tokens=tokens,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            process_group=process_group,
        )
        self.size = size
        self._buckets = buckets(self.lengths, tokens=tokens, size=size)

    @property
    def gives_fillers(self) -> bool:
        return self.fills and len(self) * self.ranks[1] > self.num_rows

    def described(self) -> dict[str, Any]:
        own = {"tokens": self.tokens, "size": self.size, "ranks": self.ranks[1]}
        return {**own, **super().described()}

    def __len__(self) -> int:
        """How many batches each rank is given in an epoch."""
        num_batches = sum(number for _, number in self._buckets)
        full, left = divmod(num_batches, self.ranks[1])
        return full + bool(left and not self.leaves_out_last)

    def rounds(self, start: int) -> Iterator[list[Batch]]:
        num_ranks, batches = self.ranks[1], self._batches()
        end = len(self) * num_ranks
        if batches and not self.leaves_out_last:
            batches = part(batches, end, first=end - num_ranks)
            if lacking := end - len(batches):
                batches += self._fillers(
                    lacking, f"{self.num_rows} rows do not make {end} batches"
                )
        for first in range(start * num_ranks, end, num_ranks):
            yield batches[first : first + num_ranks]

    def _batches(self) -> list[Batch]:
        """The batches of this epoch, over all ranks, before any are split."""
        found = []
        for place, (rows, number) in enumerate(self._buckets):
            order = [rows[n] for n in self.permuted(len(rows), place)]
            shares = (share(len(rows), nth, number) for nth in range(number))
            found += [[order[index] for index in each] for each in shares]
        return [found[n] for n in self.permuted(len(found), len(self._buckets))]


def buckets(
    lengths: Sequence[int], *, tokens: int, size: int | None
) -> list[tuple[list[int], int]]:
    """Divide rows into buckets of similar lengths, the longest first.

    A bucket ends when it fills a batch and the next row is shorter by more than a
    tenth. It has its rows, and the number of batches into which they are cut.

    >>> buckets([9, 2, 10, 2, 2], tokens=20, size=None)
    [([2, 0], 1), ([1, 3, 4], 1)]
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    found: list[tuple[list[int], int]] = []
    start = 0
    while start < len(order):
        longest = lengths[order[start]]
        most = min(tokens // longest, size or tokens)
        end = start + 1
        while end < len(order) and (
            end - start < most or lengths[order[end]] * SPREAD >= longest
        ):
            end += 1
        rows = order[start:end]
        found.append((rows, -(-len(rows) // most)))
        start = end
    return found
