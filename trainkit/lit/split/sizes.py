"""The size of a split window's micro-batches: said by the user, or found."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.core.ranks import Ranks
from trainkit.core.split.cutting import Limit, MicroBatch
from trainkit.core.split.rows import Rows
from trainkit.core.split.search import SizeSearch
from trainkit.errors import TrainkitError


@dataclass(frozen=True)
class Failure:
    """Where memory ran out; plain numbers, so that nothing of it is held."""

    size: int
    num_rows: int
    text: str


class FixedSizes:
    """The user has said the size; what does not fit is the user's to know."""

    catches = False
    shown: int | None = None

    def begin(self, rows: Rows) -> Limit | None:
        return None

    def look_at(self, micro_batches: Sequence[MicroBatch]) -> None:
        pass

    def is_proven(self) -> bool:
        return True

    def failed_anywhere(self, failure: Failure | None) -> bool:
        return False


class AutoSizes:
    """`"auto"`: finds the size, together with all ranks.

    The ranks agree through a group on the hosts, so that no device waits: whether one
    of them has a micro-batch of unproven size, and how an unproven window went. Where
    a window is unproven, no backward pass communicates.

    Args:
        search: finds the size.
        ranks: those that share the window.
        group: of the same ranks, on the hosts; None where there is one rank.
        device: on which windows run.
    """

    catches = True

    def __init__(
        self, search: SizeSearch, ranks: Ranks, group: Any, device: torch.device
    ) -> None:
        self.search = search
        self._ranks = ranks
        self._group = group
        self._device = device
        self._in_tokens = False
        self._largest = self._longest = self._real = 0
        self._asked: Any = None
        self._unproven = False
        self._since = 0.0

    @property
    def shown(self) -> int | None:
        return self.search.limit

    def begin(self, rows: Rows) -> Limit:
        """A loader batch is to be cut; every rank comes here."""
        whole, longest = rows.padded, _longest_row(rows)
        if self._ranks.size > 1 and self.search.limit is None:
            whole, longest = self._most(whole, longest)
        self.search.begin(int(whole), int(longest))
        self._in_tokens = rows.has_lengths
        size = self.search.limit
        return Limit(tokens=size) if rows.has_lengths else Limit(size=size)

    def look_at(self, micro_batches: Sequence[MicroBatch]) -> None:
        """It is cut: ask the other ranks whether they have run such before."""
        self._largest = max(m.padded for m in micro_batches)
        self._longest = max(_longest(m) for m in micro_batches)
        self._real = sum(m.real for m in micro_batches)
        has_proven = self.search.has_proven(self._largest, self._longest)
        self._unproven = self.search.is_searching or not has_proven
        if self._ranks.size > 1:
            self._flag = torch.tensor([float(self._unproven)])
            self._asked = dist.all_reduce(
                self._flag, dist.ReduceOp.MAX, group=self._group, async_op=True
            )
        self._since = self._now()

    def is_proven(self) -> bool:
        """Whether every rank has run micro-batches as large; waits for their answer."""
        if self._asked is not None:
            self._asked.wait()
            self._asked = None
            self._unproven = bool(self._flag[0])
        return not self._unproven

    def failed_anywhere(self, failure: Failure | None) -> bool:
        """Tell how the window went, and hear of the other ranks; all of them act alike.

        Raises:
            TrainkitError: a single sample does not fit on some rank.
        """
        if self.is_proven() and self._ranks.size > 1:
            return False  # it communicated, so every rank has come through it
        seconds = self._now() - self._since
        size, num_rows = (failure.size, failure.num_rows) if failure else (0, 0)
        mine = [size, num_rows, self._largest, self._longest, seconds, self._real]
        table = self._shared(mine)
        failed = table[table[:, 0] > 0]
        if len(failed):
            _refuse_single_rows(failed, failure, self._in_tokens)
            self.search.failed(int(failed[:, 0].min()))
            return True
        most = table.amax(0)
        self.search.passed(
            size=int(most[2]),
            longest=int(most[3]),
            seconds=float(most[4]),
            real=float(table[:, 5].sum()),
        )
        return False

    def _shared(self, mine: list[float]) -> Tensor:
        table = torch.zeros(self._ranks.size, len(mine), dtype=torch.float64)
        table[self._ranks.index] = torch.tensor(mine, dtype=torch.float64)
        if self._ranks.size > 1:
            dist.all_reduce(table, group=self._group)
        return table

    def _most(self, *mine: float) -> list[float]:
        return self._shared([float(number) for number in mine]).amax(0).tolist()

    def _now(self) -> float:
        if self._device.type == "cuda" and self.search.is_searching:
            torch.cuda.synchronize(self._device)  # only while the search times
        return time.perf_counter()


def _longest_row(rows: Rows) -> int:
    if not rows.has_lengths:
        return 1
    return max(map(sum, zip(*(group.lengths for group in rows.groups), strict=True)))


def _longest(micro_batch: MicroBatch) -> int:
    return -(-micro_batch.padded // max(len(micro_batch.rows), 1))


def _refuse_single_rows(failed: Tensor, own: Failure | None, in_tokens: bool) -> None:
    single = failed[failed[:, 1] <= 1]
    if not len(single):
        return
    size = f" of {int(single[0, 0])} tokens" if in_tokens else ""
    said = f" ({own.text})" if own is not None else ""
    raise TrainkitError(
        f"MicroBatching: memory ran out with a single sample{size}{said}, and a sample "
        f"cannot be cut. Shorten it, or use activation checkpointing, a narrower "
        f"dtype or a smaller model."
    )
