"""The search for a micro-batch's size: the largest that fits, then the fastest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

WARM = 1
"""How many windows at a new size are not timed, while kernels and memory settle."""

TIMED = 2
"""How many windows are then timed. The faster counts, as disturbances only slow it."""

COARSE = 4
"""The factor between the sizes that are tried first, from the largest down."""

FINE = (2, 2**0.5)
"""The factors between the best size and those tried beside it afterwards."""

TOO_SLOW = 2.0
"""If a size is slower than the best by this factor, no smaller one is tried."""

CLOSE = 1.3
"""Sizes that are slower than the best by at most this factor run in turn once more, so
that a machine which slows down slows all of them."""

FINALISTS = 4
ROUNDS = 5

MOST = 40
"""The search ends after this many windows."""

Point = tuple[int, int]
"""A micro-batch: its size, and the size of its longest row."""


class SizeSearch:
    """Chooses the size with which the next window is cut.

    It begins with the whole batch (or `start`), tries smaller sizes in large steps, and
    then the sizes beside the best one. Each runs a few windows; those that are close
    run in turn once more, and the fastest stays. A size at which memory ran out, and
    all larger ones, are not tried again. Every rank must give it equal numbers.

    Args:
        start: the first size tried, and the largest, in the unit of the batches; None:
            the whole batch.
        grow_after: twice the size is tried again after this many windows since memory
            last ran out; None: never.

    Attributes:
        limit: the present size; None before the first window.
        is_searching: whether windows are still timed.
    """

    def __init__(
        self, *, start: int | None = None, grow_after: int | None = None
    ) -> None:
        self._start = start
        self._grow_after = grow_after
        self.limit: int | None = None
        self.is_searching = True
        self._most: int | None = None  # the largest size to be tried
        self._failed_at: int | None = None
        self._whole = self._longest = 1
        self._quiet = self._num_spent = self._num_here = 0
        self._times: dict[int, list[float]] = {}
        self._turns: list[int] | None = None
        self._proven: list[Point] = []

    def begin(self, whole: int) -> None:
        """Choose the size for the window that is about to be cut.

        Args:
            whole: its size as one micro-batch, on the rank where it is largest.
        """
        if self._most is None:
            self._most = max(self._start or whole, 1)
        if self.limit is None:
            self.limit = self._below_failed(self._most)

    def has_proven(self, points: Sequence[Point]) -> bool:
        """Whether micro-batches at least as large, with rows as long, have run."""
        return all(
            any(size <= s and longest <= n for s, n in self._proven)
            for size, longest in points
        )

    def failed(self, size: int) -> None:
        """Note that memory ran out in a micro-batch of this size."""
        assert self.limit is not None
        self._failed_at = min(size, self._failed_at or size)
        self._proven = [point for point in self._proven if point[0] < size]
        self._times = {s: t for s, t in self._times.items() if s < size}
        self._num_here = self._quiet = 0
        if self._turns is not None:
            self._turns = [s for s in self._turns if s < size]
        if not self._times:
            self._turns = None  # no size is left to take turns
            self.limit = self._below_failed(self.limit)
        elif self.is_searching:
            self._choose()
        else:
            self.limit = min(self._times, key=self._score)

    def passed(
        self,
        points: Sequence[Point],
        *,
        whole: int,
        seconds: float,
        real: float,
    ) -> None:
        """Note that a window has run.

        Args:
            points: its micro-batches, or the `frontier` of them.
            whole: its size as one micro-batch, on the rank where it is largest.
            seconds: how long it took.
            real: its size without padding.
        """
        self._proven = frontier([*self._proven, *points])
        self._whole = max(self._whole, whole)
        self._longest = max([self._longest, *(longest for _, longest in points)])
        assert self._most is not None
        if self._start is None and whole > 2 * self._most:
            self._begin_anew(whole)
        elif self.is_searching:
            self._time(seconds / max(real, 1))
        self.rest()

    def _begin_anew(self, whole: int) -> None:
        """Search again: the first batch was a small one, so its times mean little."""
        self._most = whole
        self.limit = self._below_failed(whole)
        self._times, self._turns, self.is_searching = {}, None, True
        self._num_spent = self._num_here = 0

    def rest(self) -> None:
        """Count a window that has run; try a larger size when it is due."""
        self._quiet += 1
        due = self._grow_after is not None and self._quiet >= self._grow_after
        if due and not self.is_searching:
            self._grow()

    def _grow(self) -> None:
        assert self.limit is not None
        assert self._most is not None
        self._quiet, self._failed_at = 0, None
        # No size below the longest row is tried: its micro-batches are single rows.
        larger = min(max(2 * self.limit, self._longest), self._whole)
        self._most = max(self._most, larger)
        if self._untried(larger):
            self.limit, self.is_searching, self._num_spent = larger, True, 0

    # ---- what to time ----------------------------------------------------------------

    def _time(self, seconds: float) -> None:
        assert self.limit is not None
        self._num_spent += 1
        self._num_here += 1
        if self._turns is not None:
            self._times[self._turns.pop(0)].append(seconds)
            self._choose()
            return
        if self._num_here > WARM:
            self._times.setdefault(self.limit, []).append(seconds)
        if self._num_here >= WARM + TIMED:
            self._choose()

    def _choose(self) -> None:
        """Choose the size of the next window."""
        self._num_here = 0
        if self._turns is None:
            size = self._next_size()
            if size is not None and self._num_spent < MOST:
                self.limit = size
                return
            self._turns = self._last_turns()
        if self._turns and self._num_spent < MOST:
            self.limit = self._turns[0]
            return
        self._turns, self.is_searching = None, False
        self.limit = min(self._close(), key=self._score)

    def _next_size(self) -> int | None:
        """A size that may be the best and was not tried yet; None if there is none."""
        best, smallest = min(self._times, key=self._fastest), min(self._times)
        too_slow = self._fastest(smallest) > TOO_SLOW * self._fastest(best)
        beside = [] if too_slow else [smallest // COARSE]
        for step in FINE:
            beside += [max(round(best / step), self._longest), round(best * step)]
        return next((size for size in beside if self._untried(size)), None)

    def _untried(self, size: int) -> bool:
        assert self._most is not None
        known = any(abs(size - timed) <= 0.1 * timed for timed in self._times)
        below = self._failed_at is None or size < self._failed_at
        return self._longest <= size <= self._most and below and not known

    def _last_turns(self) -> list[int]:
        close = self._close()
        return close * ROUNDS if len(close) > 1 else []

    def _close(self) -> list[int]:
        sizes = sorted(self._times, key=self._fastest)[:FINALISTS]
        limit = CLOSE * self._fastest(sizes[0])
        return [size for size in sizes if self._fastest(size) <= limit]

    def _fastest(self, size: int) -> float:
        return min(self._times[size])

    def _score(self, size: int) -> float:
        return median(self._times[size])

    def _below_failed(self, size: int) -> int:
        while self._failed_at is not None and size >= self._failed_at and size > 1:
            size //= 2
        return size

    # ---- checkpoints -----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The limits with which a resumed run begins. It may run on another machine, so
        no times are kept, and no sizes that have run."""
        return {
            "limit": None if self.is_searching else self.limit,
            "failed_at": self._failed_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.limit = state["limit"]
        self.is_searching = self.limit is None
        self._failed_at = state["failed_at"]


def frontier(points: Sequence[Point]) -> list[Point]:
    """The points that no other point exceeds in both numbers, the largest first.

    >>> frontier([(8, 2), (6, 2), (4, 4), (8, 1)])
    [(8, 2), (4, 4)]
    """
    kept: list[Point] = []
    for size, longest in sorted(set(points), reverse=True):
        if not kept or longest > kept[-1][1]:
            kept.append((size, longest))
    return kept
