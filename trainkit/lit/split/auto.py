"""The size of micro-batches that is found in training, where memory may run out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from trainkit.core.accumulator import Accumulator
from trainkit.core.out_of_memory import is_out_of_memory, release
from trainkit.core.ranks import Ranks
from trainkit.core.split.cutting import Limit, MicroBatch
from trainkit.core.split.rows import Rows
from trainkit.core.split.search import SizeSearch
from trainkit.errors import TrainkitError
from trainkit.lit._compat import as_hook, current_hook
from trainkit.lit.aside import Kept

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


@dataclass(frozen=True)
class Failure:
    """The micro-batch in which memory ran out, in plain numbers that hold no memory."""

    size: int
    num_rows: int
    text: str


class AutoSizes:
    """Finds the size together with all ranks, for `"auto"`.

    A window in which memory runs out, on any rank, runs again on all of them in smaller
    micro-batches. So its gradients stay on their ranks until all have come through, and
    no backward pass communicates.

    Args:
        start: the size with which the search begins.
        found: what an earlier run has found, as the search's `state_dict` gives it.
        hosts: of the ranks, which share what has happened after each window.
        device: the device on which windows run.

    Attributes:
        search: finds the size.
        shown: the size with which the present window is cut.
    """

    def __init__(
        self,
        start: int | None,
        found: Mapping[str, Any] | None,
        hosts: Hosts,
        device: torch.device,
    ) -> None:
        self.search = SizeSearch(start=start)
        if found is not None:
            self.search.load_state_dict(found)
        self.shown: int | None = None
        self._hosts, self._device = hosts, device
        self._unit = "rows"
        self._whole = self._real = 0
        self._since = 0.0

    def limit_for(self, rows: Rows) -> Limit:
        """The size limit for a loader batch about to be cut; every rank calls this."""
        whole = self._whole = rows.padded
        self._real = rows.real_of(range(rows.num_rows))
        if self.search.limit is None:
            (whole,) = map(int, self._hosts.largest([whole]))
        self.search.begin(whole)
        size = self.shown = self.search.limit
        self._unit, self._since = "tokens" if rows.has_lengths else "rows", self._now()
        return Limit(tokens=size) if rows.has_lengths else Limit(size=size)

    def came_through(self, failure: Failure | None) -> bool:
        """Whether no rank has run out of memory in the window; every rank calls this.

        Raises:
            TrainkitError: a single sample does not fit on some rank.
        """
        pace = (self._now() - self._since) / max(self._real, 1)
        failed, single = NO_SIZE, 0
        if failure is not None:
            failed, single = -failure.size, failure.size * (failure.num_rows <= 1)
        numbers = self._hosts.largest([failed, single, pace, self._whole])
        if numbers[1]:
            self._refuse_single_row(int(numbers[1]), failure)
        if numbers[0] == NO_SIZE:
            self._pass(*numbers[2:])
            return True
        before, size = self.search.limit, -int(numbers[0])
        self.search.failed(size)
        rank_zero_info(
            f"MicroBatching: memory ran out in a micro-batch of {size} {self._unit}, "
            f"under a limit of {before}; the window is run again under "
            f"{self.search.limit}."
        )
        return False

    def _pass(self, pace: float, whole: float) -> None:
        searched = self.search.is_searching
        self.search.passed([], whole=int(whole), seconds=pace, real=1)
        if searched and not self.search.is_searching:
            rank_zero_info(
                f"MicroBatching: windows are cut into micro-batches of at most "
                f"{self.search.limit} {self._unit}; larger ones are no faster."
            )

    def _refuse_single_row(self, size: int, own: Failure | None) -> None:
        shown = f" of {size} tokens" if self._unit == "tokens" else ""
        said = f" ({own.text})" if own is not None else ""
        raise TrainkitError(
            f"MicroBatching: memory ran out with a single sample{shown}{said}, and a "
            f"sample cannot be cut. Shorten it, or use activation checkpointing, a "
            f"narrower dtype or a smaller model."
        )

    def _now(self) -> float:
        if self._device.type == "cuda" and self.search.is_searching:
            torch.cuda.synchronize(self._device)  # only while the search times
        return time.perf_counter()


class KeptGradients:
    """A copy of gradients, to begin again with.

    Args:
        parameters: whose gradients.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._kept = [
            (p, None if p.grad is None else p.grad.clone()) for p in parameters
        ]

    def restore(self) -> None:
        for parameter, _ in self._kept:
            parameter.grad = None
        for parameter, gradient in self._kept:
            parameter.grad = None if gradient is None else gradient.clone()


def run_until_it_fits(
    attempt: Callable[[], None],
    sizes: AutoSizes,
    module: Any,
    accumulator: Accumulator,
    *,
    parameters: list[Tensor],
    under_way: Callable[[], MicroBatch | None],
    forget: Callable[[], None],
) -> None:
    """Run a loader batch until it fits in memory, on all ranks.

    Before each new attempt everything is put back: the gradients and totals of the
    window, the module's state, random generators, and what was logged.

    Args:
        attempt: runs it.
        sizes: take a smaller size after a failure, or refuse.
        module: the module that trains.
        accumulator: holds the open window.
        parameters: what holds the window's gradients.
        under_way: returns the micro-batch that runs; None before the batch is cut.
        forget: drops what the attempt has collected.
    """
    gradients = KeptGradients(parameters)
    kept = Kept(module, device=module.device)
    mark = accumulator.window.copy()

    def failure() -> Failure | None:
        """Run one attempt; returns the failure if memory runs out."""
        try:
            # After an error Lightning would keep the hook's name.
            with as_hook(module, current_hook(module)):
                attempt()
        except Exception as error:
            part = under_way()
            if part is None or not is_out_of_memory(error):
                raise
            found = Failure(part.padded, len(part.rows), type(error).__name__)
            release(error)
            forget()
            return found
        return None

    while not sizes.came_through(failure()):
        accumulator.rewind(mark)
        gradients.restore()
        forget()
        kept.restore()
