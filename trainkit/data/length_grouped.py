"""Batches of a fixed number of rows with similar lengths."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from trainkit.core.plan.options import check_whole_number
from trainkit.data.length_sampler import Batch, LengthSampler


class LengthGroupedSampler(LengthSampler):
    """Makes batches of `batch_size` rows with similar lengths.

    An epoch's rows are shuffled and divided into pools of `pool` batches. Each pool is
    sorted by length and cut into batches, and the batches are shuffled. A larger pool
    means less padding, but also less chance in which rows meet.

    Args:
        lengths: the lengths of the rows, in order.
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
        lengths: Iterable[int] | Tensor,
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
