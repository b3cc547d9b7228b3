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

    Attributes:
        limit: the present size; None before the first window.
        is_searching: whether windows are still timed.
    """

    def __init__(self, *, start: int | None = None) -> None:
        self._start, self._whole = start, 0
        self.limit: int | None = None
        self.is_searching = True
        self._times: list[float] = []
        self._best: float | None = None  # with half the size
        self._failed_at: int | None = None

    def begin(self, whole: int) -> None:
        """Choose the size for the window that is about to be cut.

        Args:
            whole: its size as one micro-batch, on the rank where it is largest.
        """
        if self.limit is None:
            self.limit = self._start or max(whole // SHARE, 1)

    def failed(self, size: int) -> None:
        """Note that memory ran out in a micro-batch of this size."""
        assert self.limit is not None
        self._failed_at = min(size, self._failed_at or size)
        self.limit = max(min(self.limit, size) // 2, 1)
        self.is_searching = False

    def passed(self, *, whole: int, seconds: float, real: float) -> None:
        """Note that a window has run.

        Args:
            whole: its size as one micro-batch, on the rank where it is largest.
            seconds: how long it took.
            real: its size without padding.
        """
        grew, self._whole = whole > 2 * self._whole, max(whole, self._whole)
        if grew and self._failed_at is None:  # also: the first batch was a short one
            self.is_searching, self._best, self._times = True, None, []
        if not self.is_searching:
            return
        self._times.append(seconds / max(real, 1))
        if len(self._times) < WARM + TIMED:
            return
        time, self._times = min(self._times[WARM:]), []
        assert self.limit is not None
        if self._best is not None and FASTER * time > self._best:
            self.limit, self.is_searching = max(self.limit // 2, 1), False
        elif self.limit >= whole:
            self.is_searching = False
        else:
            self._best, self.limit = time, 2 * self.limit

    # ---- checkpoints -----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The limits with which a resumed run begins. It may run on another machine, so
        no times are kept."""
        limit = None if self.is_searching else self.limit
        return {"limit": limit, "failed_at": self._failed_at, "whole": self._whole}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.limit, self._failed_at = state["limit"], state["failed_at"]
        self._whole, self.is_searching = state.get("whole", 0), self.limit is None
