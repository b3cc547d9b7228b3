"""The size of a split window's micro-batches, set by the user or found."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from trainkit.core.ranks import Ranks
from trainkit.core.split.cutting import Limit, MicroBatch
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.split.rows import Rows
from trainkit.core.split.search import Point, SizeSearch, frontier
from trainkit.errors import TrainkitError
from trainkit.lit.split import refusals

FAILED_SIZE, FAILED_ROWS, SECONDS, REAL, WHOLE, NUM_COLUMNS = range(6)
"""The numbers that each rank shares about a window; points of micro-batches follow."""

NUM_POINTS = 8


@dataclass(frozen=True)
class Failure:
    """The micro-batch in which memory ran out, in plain numbers that hold no memory."""

    size: int
    num_rows: int
    text: str


class FixedSizes:
    """The size that the user has set; running out of memory is an error."""

    catches = False
    shown: int | None = None

    def begin(self, rows: Rows) -> Limit | None:
        return None

    def exchange(self, micro_batches: Sequence[MicroBatch]) -> None:
        pass

    def is_proven(self) -> bool:
        return True

    def failed_anywhere(self, failure: Failure | None) -> bool:
        return False


class AutoSizes:
    """Finds the size together with all ranks, for `"auto"`.

    The ranks communicate through a group on the hosts, so that no device waits. Before
    a window they share whether one of them has a micro-batch of unproven size, and
    after an unproven window its result. In an unproven window no backward pass
    communicates.

    Args:
        search: finds the size.
        ranks: the ranks that share the window.
        group: their group on the hosts; None for one rank.
        device: the device on which windows run.

    Attributes:
        shown: the size with which the present window is cut.
    """

    catches = True

    def __init__(
        self, search: SizeSearch, ranks: Ranks, group: Any, device: torch.device
    ) -> None:
        self.search = search
        self.shown: int | None = None
        self._ranks = ranks
        self._group = group
        self._device = device
        # DDP remembers which parameters were used until a pass communicates. After a
        # window without communication it would take unused parameters for used: their
        # gradients would be zeros, not None, and their optimizer states would move.
        self._never_overlaps = (
            ranks.ddp is not None and ranks.ddp.find_unused_parameters
        )
        self._in_tokens = False
        self._points: list[Point] = []
        self._whole = self._real = 0
        self._asked: Any = None
        self._unproven = False
        self._since = 0.0

    def begin(self, rows: Rows) -> Limit:
        """The size limit for a loader batch about to be cut; every rank calls this."""
        whole = self._whole = rows.padded
        self._in_tokens = rows.has_lengths
        if self.search.limit is None:
            whole = int(self._shared([float(whole)]).amax())
        self.search.begin(whole)
        size = self.shown = self.search.limit
        return Limit(tokens=size) if rows.has_lengths else Limit(size=size)

    def exchange(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Ask all ranks whether each has already run micro-batches this large."""
        self._points = frontier([(m.padded, _longest(m)) for m in micro_batches])
        self._real = sum(m.real for m in micro_batches)
        has_proven = self.search.has_proven(self._points)
        self._unproven = (
            self._never_overlaps or self.search.is_searching or not has_proven
        )
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
        """Agree with all ranks whether the window failed on any of them.

        Raises:
            TrainkitError: a single sample does not fit on some rank.
        """
        if self.is_proven() and self._ranks.size > 1:
            return False  # it communicated, so every rank has come through it
        table = self._shared(self._numbers(failure))
        failed = table[table[:, FAILED_SIZE] > 0]
        if len(failed):
            _refuse_single_rows(failed, failure, self._in_tokens)
            self._fail(int(failed[:, FAILED_SIZE].min()))
            return True
        self._pass(table)
        return False

    def _numbers(self, failure: Failure | None) -> list[float]:
        """This rank's row of numbers about the window."""
        row = [0.0] * NUM_COLUMNS
        if failure is not None:
            row[FAILED_SIZE], row[FAILED_ROWS] = failure.size, failure.num_rows
        row[SECONDS], row[REAL] = self._now() - self._since, self._real
        row[WHOLE] = self._whole
        points = [*self._points, *[(0, 0)] * NUM_POINTS][:NUM_POINTS]
        return [*row, *itertools.chain(*points)]

    def _fail(self, size: int) -> None:
        before = self.search.limit
        self.search.failed(size)
        rank_zero_info(
            f"MicroBatching: memory ran out in a micro-batch of {size} {self._unit}, "
            f"under a limit of {before}; the window is run again under "
            f"{self.search.limit}."
        )

    def _pass(self, table: Tensor) -> None:
        points = table[:, NUM_COLUMNS:].reshape(-1, 2).int().tolist()
        searched = self.search.is_searching
        self.search.passed(
            [(size, longest) for size, longest in points if size],
            whole=int(table[:, WHOLE].max()),
            seconds=float(table[:, SECONDS].max()),
            real=float(table[:, REAL].sum()),
        )
        if searched and not self.search.is_searching:
            rank_zero_info(
                f"MicroBatching: windows are cut into micro-batches of at most "
                f"{self.search.limit} {self._unit}; larger ones are no faster."
            )

    @property
    def _unit(self) -> str:
        return "tokens" if self._in_tokens else "rows"

    def _shared(self, mine: list[float]) -> Tensor:
        """The numbers of all ranks, one row for each."""
        table = torch.zeros(self._ranks.size, len(mine), dtype=torch.float64)
        table[self._ranks.index] = torch.tensor(mine, dtype=torch.float64)
        if self._ranks.size > 1:
            dist.all_reduce(table, group=self._group)
        return table

    def _now(self) -> float:
        if self._device.type == "cuda" and self.search.is_searching:
            torch.cuda.synchronize(self._device)  # only while the search times
        return time.perf_counter()


def sizes_for(
    pl_module: Any, options: MicroBatching, ranks: Ranks, found: Any
) -> FixedSizes | AutoSizes:
    """The size that the options say, or what finds it.

    Args:
        pl_module: what trains.
        options: how loader batches are cut.
        ranks: that share a window.
        found: what an earlier run has found, if it has.
    """
    if not options.is_auto:
        return FixedSizes()
    communicates = refusals.communicates_in_forward(pl_module, ranks)
    refusals.refuse_auto_between_ranks(pl_module.trainer, communicates)
    group = dist.new_group(backend="gloo") if ranks.size > 1 else None
    search = SizeSearch(start=options.start)
    if found is not None:
        search.load_state_dict(found)
    return AutoSizes(search, ranks, group, pl_module.device)


def describe(options: MicroBatching, *, is_step: bool) -> str:
    """How loader batches are cut, for the table before training.

    >>> describe(MicroBatching(size=4), is_step=False)
    'each loader batch is cut into micro-batches of at most 4 rows; logged means \
weighed as the loss'

    Args:
        options: how they are cut.
        is_step: whether one loader batch makes an optimizer step; otherwise several.
    """
    if options.is_auto:
        how = "into micro-batches that double while that is faster"
    else:
        limits = {"rows": options.size, "tokens": options.tokens}
        said = [f"{limit} {unit}" for unit, limit in limits.items() if limit]
        how = f"into micro-batches of at most {' and '.join(said)}"
    is_what = "is one step," if is_step else "is"
    return f"each loader batch {is_what} cut {how}; logged means weighed as the loss"


def _longest(micro_batch: MicroBatch) -> int:
    return -(-micro_batch.padded // max(len(micro_batch.rows), 1))


def _refuse_single_rows(failed: Tensor, own: Failure | None, in_tokens: bool) -> None:
    single = failed[failed[:, FAILED_ROWS] <= 1]
    if not len(single):
        return
    size = f" of {int(single[0, FAILED_SIZE])} tokens" if in_tokens else ""
    said = f" ({own.text})" if own is not None else ""
    raise TrainkitError(
        f"MicroBatching: memory ran out with a single sample{size}{said}, and a sample "
        f"cannot be cut. Shorten it, or use activation checkpointing, a narrower "
        f"dtype or a smaller model."
    )
