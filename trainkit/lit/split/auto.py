"""The size of micro-batches that is found in training, where memory may run out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info

from trainkit.core._compat import owe_forward_messages, send_forward_messages
from trainkit.core.out_of_memory import is_out_of_memory, release
from trainkit.core.ranks import Ranks
from trainkit.core.split.cutting import Limit, MicroBatch
from trainkit.core.split.rows import Rows
from trainkit.errors import TrainkitError
from trainkit.lit._compat import as_hook, current_hook
from trainkit.lit.aside import Kept

SHARE = 8
"""The search begins with so small a part of the first loader batch."""

WARM, TIMED = 1, 2
"""How many windows at a size are not timed, while kernels and memory settle, and how
many are. The faster counts, as disturbances only slow it."""

FASTER = 1.03
"""A size twice as large must be faster by this factor."""


class SizeSearch:
    """Chooses the size with which the next window is cut.

    It begins with an eighth of the first loader batch, and doubles while windows run
    faster, up to the whole batch. Memory that runs out halves it, and ends the search.
    Every rank must give it equal numbers.

    Args:
        found: what another run has found, as `state_dict` gives it.

    Attributes:
        limit: the present size; None before the first window.
        is_searching: whether windows are still timed.
    """

    def __init__(self, found: Mapping[str, Any] | None = None) -> None:
        self.limit: int | None = (found or {}).get("limit")
        self.is_searching = self.limit is None
        self._times: list[float] = []
        self._best: float | None = None  # with half the size

    def begin(self, whole: int) -> int:
        """The size for the window that is about to be cut; `whole` is that of it as one
        micro-batch, on the rank where it is largest."""
        self.limit = self.limit or max(whole // SHARE, 1)
        return self.limit

    def failed(self, size: int) -> None:
        """Note that memory ran out in a micro-batch of this size."""
        self.limit = max(min(self.begin(size), size) // 2, 1)
        self.is_searching = False

    def passed(self, whole: int, pace: float) -> None:
        """Note that a window has run.

        Args:
            whole: its size as one micro-batch, on the rank where it is largest.
            pace: how long it took, over its size without padding.
        """
        if not self.is_searching:
            return
        self._times.append(pace)
        if len(self._times) < WARM + TIMED:
            return
        time, self._times = min(self._times[WARM:]), []
        limit = self.begin(whole)
        if self._best is not None and FASTER * time > self._best:
            self.limit, self.is_searching = max(limit // 2, 1), False
        elif limit >= whole:
            self.is_searching = False
        else:
            self._best, self.limit = time, 2 * limit

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run begins with. It may run on another machine, so no times
        are kept."""
        return {"limit": None if self.is_searching else self.limit}


NO_SIZE = -torch.inf


class Hosts:
    """The hosts of the ranks, which exchange numbers so that no device waits.

    Args:
        ranks: that share a window; all of them make this together.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._group = dist.new_group(backend="gloo") if ranks.size > 1 else None

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """The largest of the ranks' numbers, place by place; all of them call this."""
        if self._group is None:
            return list(numbers)
        found = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return found.tolist()


class AutoSizes:
    """Finds the size together with all ranks, for `"auto"`.

    A window in which memory runs out, on any rank, runs again on all of them in smaller
    micro-batches. So its gradients stay on their ranks until all have come through, and
    no backward pass communicates.

    Args:
        found: what an earlier run has found, as the search's `state_dict` gives it.
        ranks: that share what has happened after each window.
        backend: Lightning's strategy object.

    Attributes:
        search: finds the size.
        shown: the size with which the present window is cut.
    """

    def __init__(
        self, found: Mapping[str, Any] | None, ranks: Ranks, backend: Any
    ) -> None:
        self.search = SizeSearch(found)
        self.shown: int | None = None
        self._hosts, self._ddp = Hosts(ranks), ranks.ddp
        self._device = backend.root_device
        self._block = getattr(backend, "block_backward_sync", nullcontext)
        self._unit = "rows"
        self._whole = self._real = 0

    def limit_for(self, rows: Rows) -> Limit:
        """The size limit for rows that are about to be cut; every rank calls this."""
        whole = rows.padded
        self._whole = max(self._whole, whole)
        self._real += rows.real_of(range(rows.num_rows))
        if self.search.limit is None:
            (whole,) = map(int, self._hosts.largest([whole]))
        size = self.shown = self.search.begin(whole)
        self._unit = "tokens" if rows.spans else "rows"
        return Limit(tokens=size) if rows.spans else Limit(size=size)

    def run(
        self,
        attempt: Callable[[], None],
        module: Any,
        begin_again: Callable[[], MicroBatch | None],
    ) -> None:
        """Run a window until it fits in memory, on all ranks.

        Before each new attempt everything is put back: the window and its gradients,
        the module's state, random generators, and what was logged.

        Args:
            attempt: runs the window.
            module: the module that trains.
            begin_again: drops what the attempt has left; returns the micro-batch that
                was under way, or None if none was.
        """
        kept = Kept(module, device=module.device)
        while True:
            self._whole = self._real = 0
            since, failed, single, name = self._now(), NO_SIZE, 0, ""
            try:
                # After an error Lightning would keep the hook's name.
                with as_hook(module, current_hook(module)):
                    attempt()
            except Exception as error:
                part = begin_again()
                if part is None or not is_out_of_memory(error):
                    raise
                release(error)
                failed, name = -part.padded, f" ({type(error).__name__})"
                single = part.padded if len(part.rows) == 1 else 0
            pace = (self._now() - since) / max(self._real, 1)
            numbers = self._hosts.largest([failed, single, pace, self._whole])
            if self._came_through(numbers, name):
                return
            begin_again()
            kept.restore()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """A context for a window, in which no forward or backward pass of DDP waits for
        other ranks."""
        ddp = self._ddp
        if ddp is not None:
            send_forward_messages(ddp)
        with self._block():
            yield
        if ddp is not None:
            owe_forward_messages(ddp)

    def _came_through(self, numbers: Sequence[float], name: str) -> bool:
        """Whether no rank has run out of memory in the window.

        Args:
            numbers: the largest of the ranks': minus the size of a micro-batch in which
                memory ran out; that of one with a single sample, in which it did, or 0;
                the time for a token; the size of a loader batch as one micro-batch.
            name: of the error of this rank.

        Raises:
            TrainkitError: a single sample does not fit on some rank.
        """
        failed, single, pace, whole = numbers
        search, unit = self.search, self._unit
        if single:
            shown = f" of {single:.0f} tokens" if unit == "tokens" else ""
            raise TrainkitError(
                f"MicroBatching: memory ran out with a single sample{shown}{name}, and "
                f"a sample cannot be cut. Shorten it, or use activation checkpointing, "
                f"a narrower dtype or a smaller model."
            )
        before, was_searching = search.limit, search.is_searching
        if failed != NO_SIZE:
            search.failed(-int(failed))
            rank_zero_info(
                f"MicroBatching: memory ran out in a micro-batch of {-failed:.0f} "
                f"{unit}, under a limit of {before}; the window is run again under "
                f"{search.limit}."
            )
            return False
        search.passed(int(whole), pace)
        if was_searching and not search.is_searching:
            rank_zero_info(
                f"MicroBatching: windows are cut into micro-batches of at most "
                f"{search.limit} {unit}; larger ones are no faster."
            )
        return True

    def _now(self) -> float:
        if self._device.type == "cuda" and self.search.is_searching:
            torch.cuda.synchronize(self._device)  # only while the search times
        return time.perf_counter()
