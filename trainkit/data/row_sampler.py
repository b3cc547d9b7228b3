"""The sampler that deals single rows to the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, Literal, get_args

from trainkit.data.epoch_order import EpochOrder
from trainkit.data.filler import Filler
from trainkit.errors import TrainkitError

Last = Literal["weight", "pad", "drop"]


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
        last: Last = "weight",
        process_group: Any = None,
    ) -> None:
        super().__init__(
            dataset, shuffle=shuffle, seed=seed, process_group=process_group
        )
        self.batch_size = batch_size
        self.last = last
        self._has_warned = False

    @property
    def stretch(self) -> int:
        """How many rows all ranks together read in one batch each."""
        return self.batch_size * self.ranks[1]

    @property
    def end(self) -> int:
        """How many rows of the dataset an epoch has, over all ranks."""
        left = self.num_rows % self.stretch
        is_enough = self.fills or left >= self.ranks[1]
        is_kept = is_enough and self.last != "drop"
        return self.num_rows if is_kept else self.num_rows - left

    @property
    def gives_fillers(self) -> bool:
        left = self.end % self.stretch
        lacks = self.last == "pad" or left < self.ranks[1]
        return self.fills and left > 0 and lacks

    def after(self, position: int) -> int:
        return min(position + self.stretch, self.end)

    def described(self) -> dict[str, Any]:
        return {
            "dataset": self.num_rows,
            **super().described(),
            "batch_size x ranks": self.stretch,
        }

    def __len__(self) -> int:
        """How many rows this rank reads in an epoch, fillers included."""
        full, left = divmod(self.end, self.stretch)
        rows, fillers = self._shared(left)
        return full * self.batch_size + len(rows) + fillers

    def __iter__(self) -> Iterator[int]:
        """This rank's rows, from the position `start` on."""
        self._check_rows()
        order, begin = self.permuted(self.num_rows), self.start
        while begin < self.end:
            stretch = order[begin : self.after(begin)]
            rows, fillers = self._shared(len(stretch))
            yield from (stretch[row] for row in rows)
            yield from [Filler(stretch[0])] * fillers
            begin += len(stretch)

    def _shared(self, num_rows: int) -> tuple[range, int]:
        """This rank's rows in a stretch, and how many fillers come after them."""
        if not num_rows:
            return range(0), 0
        rows = share(num_rows, *self.ranks)
        least = self.batch_size if self.last == "pad" else 1
        return rows, max(least - len(rows), 0) if self.fills else 0

    def _check_rows(self) -> None:
        num_rows, (rank, num_ranks) = self.num_rows, self.ranks
        if num_rows and not self.end:
            raise TrainkitError(
                f"ResumableLoader: every rank must have a row in every batch, and "
                f"{num_rows} rows give not one batch of {self.batch_size} on "
                f"{num_ranks} ranks with last={self.last!r}. Lower batch_size, use "
                f"fewer ranks, or give weigh_nothing=."
            )
        left = num_rows - self.end
        if left and self.last != "drop" and rank == 0 and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"ResumableLoader: the last {left} of {num_rows} rows are too few for "
                f"{num_ranks} ranks to have one each, and are left out of the epoch"
                f"{' (others in the next)' if self.shuffle else ''}. To read them, "
                f"give weigh_nothing=: the other ranks then read a row that weighs "
                f"nothing.",
                stacklevel=2,
            )


def check_last(last: object, weigh_nothing: object, *, drop_last: bool) -> None:
    """Refuse an unknown `last`, and options that do not fit it."""
    if last not in get_args(Last):
        raise TrainkitError(
            f"ResumableLoader last: must be one of {', '.join(get_args(Last))}, "
            f"received {last!r}. 'weight' reads the last batch as it is."
        )
    if drop_last and last == "pad":
        raise TrainkitError(
            "ResumableLoader last='pad': cannot go with drop_last=True, which means "
            "last='drop'. Give one of them."
        )
    if last == "pad" and weigh_nothing is None:
        raise TrainkitError(
            "ResumableLoader last='pad': needs weigh_nothing=, a function that changes "
            "a row so that it weighs nothing, received None. For example "
            "trainkit.WeighNothing(labels=-100) with PerToken()."
        )


def share(num_rows: int, rank: int, num_ranks: int) -> range:
    """A rank's share of a number of rows; shares differ by one row at most.

    >>> [list(share(5, rank, 3)) for rank in range(3)]
    [[0, 1], [2, 3], [4]]
    """
    each, more = divmod(num_rows, num_ranks)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))
