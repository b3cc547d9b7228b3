"""Batches of as many rows with similar lengths as fit into a budget of tokens."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from trainkit.core.plan.options import check_whole_number
from trainkit.data.length_sampler import Batch, LengthSampler
from trainkit.data.row_sampler import share

SPREAD = 1.1
"""The longest row of a bucket may be this many times as long as its shortest row."""


class TokenBudgetSampler(LengthSampler):
    """Cuts an epoch into batches of at most so many tokens, padding included.

        rows = ResumableLoader(
            dataset, batch_sampler=TokenBudgetSampler(lengths, tokens=4096, seed=1)
        )

    Rows with similar lengths make a bucket, and batches are cut from buckets. Which
    rows meet in a batch is drawn anew in each epoch. The number of batches is fixed, so
    that a Trainer's count of them stays right.

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
        check_whole_number("TokenBudgetSampler tokens", tokens)
        if size is not None:
            check_whole_number("TokenBudgetSampler size", size)
        super().__init__(
            lengths,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            process_group=process_group,
        )
        self._refuse_longer(tokens)
        self.tokens, self.size = tokens, size
        self._buckets = buckets(self.lengths, tokens=tokens, size=size)

    @property
    def num_batches(self) -> int:
        return sum(number for _, number in self._buckets)

    def described(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "size": self.size, **super().described()}

    def batches(self) -> list[Batch]:
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
