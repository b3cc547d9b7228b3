"""Which rows a rank reads, in an order that epoch and seed alone decide."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sized
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from trainkit.errors import TrainkitError


class RowSampler(DistributedSampler[Any]):
    """Deals an epoch's rows to the ranks, one batch each at a time.

    The epoch's order is cut into stretches of `batch_size` rows times the number of
    ranks, and each stretch is shared out. So after any number of batches the rows that
    all ranks have read are the first ones of the order, with one rank or with several:
    that is what lets a run go on at its very row. In the last stretch ranks may differ
    by one row. No row is read twice.

    It is a `DistributedSampler` so that Lightning puts no other in its place. The ranks
    are looked up when rows are read, not when it is made.

    Args:
        dataset: with a length.
        batch_size: rows of a batch on one rank.
        shuffle: whether each epoch has an order of its own.
        seed: of the orders.
        drop_last: leave out the last stretch if it is not full.
        process_group: the ranks that share the rows; default: all.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        process_group: Any = None,
    ) -> None:
        super().__init__(
            cast(Any, dataset), num_replicas=1, rank=0, shuffle=shuffle, seed=seed
        )
        self.batch_size = batch_size
        self.leaves_out_last = drop_last
        self.process_group = process_group
        self.first_row = 0
        self._said = False

    @property
    def ranks(self) -> tuple[int, int]:
        """This rank, and how many share the rows."""
        if not (dist.is_available() and dist.is_initialized()):
            return 0, 1
        return dist.get_rank(self.process_group), dist.get_world_size(
            self.process_group
        )

    @property
    def stretch(self) -> int:
        """How many rows all ranks read in one batch of each."""
        return self.batch_size * self.ranks[1]

    @property
    def num_rows(self) -> int:
        """How many rows an epoch has, over all ranks."""
        all_rows = len(cast(Sized, self.dataset))
        left = all_rows % self.stretch
        if self.leaves_out_last or left < self.ranks[1]:
            return all_rows - left
        return all_rows

    def set_epoch(self, epoch: int) -> None:
        """Choose the order, as Lightning does before each epoch."""
        self.epoch = epoch

    def seed_for(self, *parts: int) -> int:
        """A seed that differs with the epoch and with each of the parts."""
        seed = self.seed
        for part in (self.epoch, *parts):
            seed = seed * 1_000_003 + part
        return seed % 2**63

    def __len__(self) -> int:
        full, left = divmod(self.num_rows, self.stretch)
        return full * self.batch_size + _share(left, *self.ranks)[1]

    def __iter__(self) -> Iterator[int]:
        """This rank's rows from `first_row` on, which counts those of all ranks."""
        self._check_rows()
        order = self._order()
        for start in range(self.first_row, self.num_rows, self.stretch):
            stretch = order[start : min(start + self.stretch, self.num_rows)]
            first, length = _share(len(stretch), *self.ranks)
            yield from stretch[first : first + length]

    def _order(self) -> list[int]:
        num_rows = len(cast(Sized, self.dataset))
        if not self.shuffle:
            return list(range(num_rows))
        generator = torch.Generator().manual_seed(self.seed_for())
        return torch.randperm(num_rows, generator=generator).tolist()

    def _check_rows(self) -> None:
        all_rows, (rank, world_size) = len(cast(Sized, self.dataset)), self.ranks
        left = all_rows - self.num_rows
        if all_rows and not self.num_rows:
            raise TrainkitError(
                f"ResumableLoader: every rank must have a row in every batch, and "
                f"{all_rows} rows give not one batch of {self.batch_size} on "
                f"{world_size} ranks with drop_last={self.leaves_out_last}. Lower "
                f"batch_size, or take fewer ranks."
            )
        if left and not self.leaves_out_last and rank == 0 and not self._said:
            self._said = True
            warnings.warn(
                f"ResumableLoader: the last {left} of {all_rows} rows are too few for "
                f"{world_size} ranks to have one each, and are left out of the epoch"
                f"{' (others in the next)' if self.shuffle else ''}.",
                stacklevel=2,
            )


def _share(num_rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """The first row of a rank's share, and how many it has.

    >>> [_share(5, rank, 3) for rank in range(3)]
    [(0, 2), (2, 2), (4, 1)]
    """
    each, more = divmod(num_rows, world_size)
    return rank * each + min(rank, more), each + (rank < more)
