"""SIGINT and SIGTERM as a counter that a loop can check."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class Interruption:
    """The signals that have come.

    Attributes:
        signum: the first of them, or None.
        count: how many came.
    """

    signum: int | None = None
    count: int = 0

    @property
    def exit_status(self) -> int:
        """130 after SIGINT, 143 after SIGTERM, 0 without a signal."""
        return 0 if self.signum is None else 128 + self.signum

    def note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = self.signum or signum
        self.count += 1


@contextmanager
def counted_signals() -> Iterator[Interruption]:
    """Count signals inside a `with` block; the program decides when to leave."""
    counted = Interruption()
    before = {}
    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGINT, signal.SIGTERM):
            before[signum] = signal.signal(signum, counted.note)
    try:
        yield counted
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
