"""Finding the size of a micro-batch: the largest that fits, then the fastest."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

WARM = 1
"""Windows at a new size that are not timed: kernels are chosen, memory is mapped."""

TIMED = 2
"""Windows that are, before the next size is tried."""

ROUNDS = 3
"""Windows that each of the best sizes gets once more, in turn, so that a machine which
slows down slows them alike."""

FINALISTS = 3

SLOWER = 1.15
"""By how much slower a size must be to count as past the best one."""


class SizeSearch:
    """Which size the next window is cut with; every rank tells it the same.

    From the whole batch (or `start`) it goes down by halves. Each size runs a few
    windows, and the search ends where smaller ones only get slower; the best then run
    in turn once more, and the fastest stays. A size at which memory ran out, and all
    above it, are left.

    Args:
        start: the first size tried, in the unit of the batches; None is all of one.
        grow_after: after so many windows since memory last ran out, twice the size is
            tried again; None is never.

    Attributes:
        limit: the size of now; None before the first window.
        is_searching: whether windows are still timed.
    """

    def __init__(
        self, *, start: int | None = None, grow_after: int | None = None
    ) -> None:
        self._start = start
        self._grow_after = grow_after
        self.limit: int | None = None
        self.is_searching = True
        self._ran = 0
        self._quiet = 0
        self._times: dict[int, list[float]] = {}
        self._turns: list[int] = []
        self._longest = 1
        self._proven = (0, 0)

    def begin(self, whole: int, longest: int) -> None:
        """A window is to be cut.

        Args:
            whole: its size as one micro-batch.
            longest: the size of its longest row.
        """
        self._longest = max(self._longest, longest)
        if self.limit is None:
            self.limit = max(self._start or whole, 1)

    def has_proven(self, size: int, longest: int) -> bool:
        """Whether a micro-batch at least as large, with rows as long, has run."""
        return size <= self._proven[0] and longest <= self._proven[1]

    def failed(self, size: int) -> None:
        """Memory ran out in a micro-batch of this size."""
        assert self.limit is not None
        while self.limit >= size and self.limit > 1:
            self.limit = max(self.limit // 2, 1)
        self._proven = (min(self._proven[0], size - 1), self._proven[1])
        self._times = {s: t for s, t in self._times.items() if s < size}
        self._turns = [s for s in self._turns if s < size]
        self._ran = self._quiet = 0
        if self._turns:
            self._take_turn()

    def passed(self, *, size: int, longest: int, seconds: float, real: float) -> None:
        """A window has run.

        Args:
            size: that of its largest micro-batch.
            longest: of its longest row.
            seconds: how long it took.
            real: how much it held without padding.
        """
        self._proven = (max(self._proven[0], size), max(self._proven[1], longest))
        self._quiet += 1
        if self.is_searching:
            self._time(seconds / max(real, 1))
        elif self._grow_after is not None and self._quiet >= self._grow_after:
            assert self.limit is not None
            self.limit, self._quiet = self.limit * 2, 0

    def _time(self, seconds: float) -> None:
        assert self.limit is not None
        self._ran += 1
        if self._turns:
            self._times[self._turns.pop(0)].append(seconds)
            self._take_turn()
            return
        if self._ran > WARM:
            self._times.setdefault(self.limit, []).append(seconds)
        if self._ran == WARM + TIMED:
            self._ran = 0
            self._next_size()

    def _next_size(self) -> None:
        assert self.limit is not None
        smaller = self.limit // 2
        if smaller < self._longest or self._is_past_best():
            best = sorted(self._times, key=self._score)[:FINALISTS]
            close = [s for s in best if self._score(s) <= SLOWER * self._score(best[0])]
            self._turns = close * ROUNDS if len(close) > 1 else []
            self._take_turn()
        else:
            self.limit = smaller

    def _is_past_best(self) -> bool:
        """Whether the last two sizes were both slower than one above them."""
        sizes = sorted(self._times)
        if len(sizes) < 3:
            return False
        best = min(map(self._score, sizes))
        return all(self._score(size) > SLOWER * best for size in sizes[:2])

    def _take_turn(self) -> None:
        if self._turns:
            self.limit = self._turns[0]
        else:
            self.limit = min(self._times, key=self._score)
            self.is_searching = False

    def _score(self, size: int) -> float:
        return median(self._times[size])

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on with; what was timed is timed again."""
        return {
            "limit": self.limit,
            "is_searching": self.is_searching,
            "proven": list(self._proven),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.limit = state["limit"]
        self.is_searching = state["is_searching"]
        size, longest = state["proven"]
        self._proven = (size, longest)
