"""The orders of all samplers, and the one that deals single rows to the ranks."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sized
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from trainkit.data.filler import Filler
from trainkit.errors import TrainkitError


class EpochOrder(DistributedSampler[Any], ABC):
    """The base of trainkit's samplers: an order of rows that the ranks share.

    It is a `DistributedSampler` so that Lightning does not replace it. It looks up the
    ranks when rows are read, not when it is made. A position counts the batches that
    each rank has been given in the epoch.

    Attributes:
        epoch: the epoch whose order it gives.
        is_told: whether `set_epoch` has been called since the last resume.
        start: the position from which the next pass begins.
        fills: whether a rank without a row may be given a filler.
    """

    def __init__(
        self, dataset: Any, *, shuffle: bool, seed: int, process_group: Any = None
    ) -> None:
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise TrainkitError(
                f"{type(self).__name__} seed: must be a whole number, received "
                f"{seed!r}."
            )
        super().__init__(
            dataset, num_replicas=1, rank=0, shuffle=bool(shuffle), seed=seed
        )
        self.process_group = process_group
        self.is_told = False
        self.start = 0
        self.fills = False

    @property
    def ranks(self) -> tuple[int, int]:
        """This rank's index, and how many ranks share the rows."""
        return rank_and_size(self.process_group)

    @property
    def num_rows(self) -> int:
        return len(cast(Sized, self.dataset))

    @property
    @abstractmethod
    def end(self) -> int:
        """How many batches an epoch has on each rank."""

    @property
    @abstractmethod
    def gives_fillers(self) -> bool:
        """Whether an epoch has fillers, on this rank or on another."""

    def described(self) -> dict[str, Any]:
        """The options that must not change while a position is to keep its meaning."""
        return {"shuffle": self.shuffle, "seed": self.seed}

    def plan(self, position: int) -> dict[str, Any]:
        """What a state at this position must hold besides."""
        return {}

    def adapted(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state in which the position has the meaning that it has here."""
        return state

    def timed(self, position: int, ahead: int) -> AbstractContextManager[None]:
        """A context in which the batch before a position trains; `ahead` are read."""
        return nullcontext()

    def set_epoch(self, epoch: int) -> None:
        """Choose the order, as Lightning does before each epoch."""
        self.epoch, self.is_told = epoch, True

    def seed_for(self, *parts: int) -> int:
        """A seed that differs with the epoch and with each of the parts."""
        seed = self.seed
        for part in (self.epoch, *parts):
            seed = seed * 1_000_003 + part
        return seed % 2**63

    def permuted(self, number: int, *parts: int) -> list[int]:
        """The numbers 0, 1, ... in this epoch's order, shuffled or not."""
        if not self.shuffle:
            return list(range(number))
        generator = torch.Generator().manual_seed(self.seed_for(*parts))
        return torch.randperm(number, generator=generator).tolist()


class RowSampler(EpochOrder):
    """Deals an epoch's rows to the ranks, one batch each at a time.

    The epoch's order is cut into stretches of `batch_size` rows times the number of
    ranks, and each stretch is shared out. So after any number of batches, all ranks
    together have read the first rows of the order, however many ranks there are. That
    is why a run can resume with its next row. In the last stretch ranks may differ by
    one row. No row is read twice. If the last rows are too few for all ranks, they are
    left out, unless the sampler `fills` the other places.

    It gives rows, not batches: torch makes a `BatchSampler` of it, which Lightning
    knows. For the options see `ResumableLoader`.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        drop_last: bool = False,
        process_group: Any = None,
    ) -> None:
        super().__init__(
            dataset, shuffle=shuffle, seed=seed, process_group=process_group
        )
        self.batch_size = batch_size
        self.leaves_out_last = drop_last
        self._has_warned = False

    @property
    def stretch(self) -> int:
        """How many rows all ranks together read in one batch each."""
        return self.batch_size * self.ranks[1]

    @property
    def end(self) -> int:
        return -(-self.num_read // self.stretch)

    @property
    def num_read(self) -> int:
        """How many rows of the dataset an epoch has, over all ranks."""
        left = self.num_rows % self.stretch
        is_enough = self.fills or left >= self.ranks[1]
        is_kept = is_enough and not self.leaves_out_last
        return self.num_rows if is_kept else self.num_rows - left

    @property
    def gives_fillers(self) -> bool:
        return self.fills and 0 < self.num_read % self.stretch < self.ranks[1]

    def described(self) -> dict[str, Any]:
        return {
            "dataset": self.num_rows,
            **super().described(),
            "batch_size x ranks": self.stretch,
        }

    def __len__(self) -> int:
        """How many rows this rank reads in an epoch, fillers included."""
        full, left = divmod(self.num_read, self.stretch)
        last = max(len(share(left, *self.ranks)), 1) if left else 0
        return full * self.batch_size + last

    def __iter__(self) -> Iterator[int]:
        """This rank's rows, from the position `start` on."""
        self._check_rows()
        order = self.permuted(self.num_rows)[: self.num_read]
        for begin in range(self.start * self.stretch, len(order), self.stretch):
            stretch = order[begin : begin + self.stretch]
            rows = share(len(stretch), *self.ranks)
            yield from (stretch[row] for row in rows)
            if not rows:
                yield Filler(stretch[0])

    def _check_rows(self) -> None:
        num_rows, (rank, num_ranks) = self.num_rows, self.ranks
        if num_rows and not self.num_read:
            raise TrainkitError(
                f"ResumableLoader: every rank must have a row in every batch, and "
                f"{num_rows} rows give not one batch of {self.batch_size} on "
                f"{num_ranks} ranks with drop_last={self.leaves_out_last}. Lower "
                f"batch_size, use fewer ranks, or give weigh_nothing=."
            )
        left = num_rows - self.num_read
        if left and not (self.leaves_out_last or rank or self._has_warned):
            self._has_warned = True
            warnings.warn(
                f"ResumableLoader: the last {left} of {num_rows} rows are too few for "
                f"{num_ranks} ranks to have one each, and are left out of the epoch"
                f"{' (others in the next)' if self.shuffle else ''}. To read them, "
                f"give weigh_nothing=: the other ranks then read a row that weighs "
                f"nothing.",
                stacklevel=2,
            )


def rank_and_size(group: Any = None) -> tuple[int, int]:
    """This process's rank, and how many there are in its group."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def of_all_ranks(value: Any, group: Any = None, *, alone: bool = False) -> list[Any]:
    """The values of all ranks, each of which must ask; None of the others if it asks
    alone."""
    rank, size = rank_and_size(group)
    values: list[Any] = [None] * size
    values[rank] = value
    if size > 1 and not alone:
        dist.all_gather_object(values, value, group=group)
    return values


def share(num_rows: int, rank: int, num_ranks: int) -> range:
    """A rank's share of a number of rows; shares differ by one row at most.

    >>> [list(share(5, rank, 3)) for rank in range(3)]
    [[0, 1], [2, 3], [4]]
    """
    each, more = divmod(num_rows, num_ranks)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))
