"""What attention costs beside the tokens, found from the times of micro-batches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

WINDOWS = 8
"""How many windows are timed, after one in which the device becomes warm."""


class CostFit:
    """Finds the cost of a row's squared length, in units of the cost of a token.

    The time of a micro-batch is taken for a sum: so much for each token, and so much
    for the squares of lengths. What it costs by itself counts with its tokens, of which
    all micro-batches have nearly as many. All ranks find the same, from the times of
    all.

    Args:
        cost: used until another is found.
    """

    def __init__(self, cost: float) -> None:
        self._first, self._found = cost, cost
        self._since: tuple[int, int] | None = None
        self._drawn: dict[int, tuple[int, int]] = {}
        self._times: list[tuple[float, ...]] = []
        self._num_windows = 0

    @property
    def is_done(self) -> bool:
        """Whether a cost has been found."""
        return self._since is not None

    def at(self, epoch: int, window: int) -> float:
        """The cost with which to plan a window."""
        is_found = self._since is not None and (epoch, window) >= self._since
        return self._found if is_found else self._first

    def saved(self) -> list[float]:
        """The cost, and what a resumed run needs to plan as this one."""
        found = [] if self._since is None else [self._found, *self._since]
        return [self._first, *found]

    def restore(self, saved: Sequence[float]) -> None:
        """Use what `saved` has returned."""
        self._first, *found = saved
        self._since = None
        if found:
            self._found, self._since = found[0], (int(found[1]), int(found[2]))

    def note(self, position: int, lengths: Sequence[int]) -> None:
        """Note what will be computed at a position, to be timed when it trains."""
        self._drawn[position] = sum(lengths), sum(n**2 for n in lengths)

    @contextmanager
    def timed(
        self, position: int, *, counts: bool, later: tuple[int, int] | None, group: Any
    ) -> Iterator[None]:
        """A context in which the micro-batch at a position trains.

        Args:
            position: that was noted for it.
            counts: whether its time says something.
            later: where it closes a window, the epoch and window from which another
                cost may be used.
            group: of the ranks that share the window.
        """
        size = self._drawn.pop(position, None)  # None: another pass has timed it
        began = _now()
        yield
        if counts and size is not None and self._num_windows:
            self._times.append((*size, _now() - began))
        if later is not None:
            self._num_windows += 1
            if self._num_windows > WINDOWS:
                self._found, self._since = fitted(_of_all(self._times, group)), later


def fitted(times: Sequence[Sequence[float]]) -> float:
    """The cost of a squared length as a share of that of a token, at least 0.

    Where the tokens seem to cost nothing, nothing can be said, and it is 0.
    """
    table = np.array(times, dtype=float)
    (token, square), *_ = np.linalg.lstsq(table[:, :2], table[:, 2], rcond=None)
    return float(square / token) if token > 0 and square > 0 else 0.0


def _of_all(times: list[Any], group: Any) -> list[Any]:
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return times
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, times, group=group)
    return [each for of_rank in found for each in of_rank]


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # only while times are taken, as the user has asked
    return time.perf_counter()
