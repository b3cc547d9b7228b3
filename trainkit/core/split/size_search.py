"""The search for a micro-batch's size: what fits, doubled while it gets faster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHARE = 8
"""The search begins with so small a part of the first loader batch."""

WARM, TIMED = 1, 2
"""How many windows at a size are not timed, while kernels and memory settle, and how
many are. The faster counts, as disturbances only slow it."""

FASTER = 1.03
"""A size twice as large must be faster by this factor."""


class SizeSearch:
    """Chooses the size with which the next window is cut.

    It doubles while windows run faster, up to the whole batch. Memory that runs out
    halves it, and ends the search. Every rank must give it equal numbers.

    Args:
        start: the first size, in the unit of the batches; default: an eighth of the
            first loader batch.
        found: what another run has found, as `state_dict` gives it.

    Attributes:
        limit: the present size; None before the first window.
        is_searching: whether windows are still timed.
    """

    def __init__(
        self, *, start: int | None = None, found: Mapping[str, Any] | None = None
    ) -> None:
        found = found or {}
        self._start, self._largest = start, found.get("whole", 0)
        self.limit: int | None = found.get("limit")
        self.is_searching = self.limit is None
        self._has_failed = bool(found.get("failed"))
        self._times: list[float] = []
        self._best: float | None = None  # with half the size

    def begin(self, whole: int) -> int:
        """The size for the window that is about to be cut; `whole` is that of it as one
        micro-batch, on the rank where it is largest."""
        self.limit = self.limit or self._start or max(whole // SHARE, 1)
        return self.limit

    def failed(self, size: int) -> None:
        """Note that memory ran out in a micro-batch of this size."""
        self.limit = max(min(self.begin(size), size) // 2, 1)
        self.is_searching, self._has_failed = False, True

    def passed(self, whole: int, pace: float) -> None:
        """Note that a window has run.

        Args:
            whole: its size as one micro-batch, on the rank where it is largest.
            pace: how long it took, over its size without padding.
        """
        grew, self._largest = whole > 2 * self._largest, max(whole, self._largest)
        if grew and not self._has_failed:  # also: the first batch was a short one
            self.is_searching, self._best, self._times = True, None, []
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
        limit = None if self.is_searching else self.limit
        return {"limit": limit, "failed": self._has_failed, "whole": self._largest}
