"""SIGINT and SIGTERM as a counter that a loop can check."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Counts signals inside a `with` block; the program decides when to leave.

    Attributes:
        signum: the first signal that came, or None.
        count: how many came.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.count = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = self.signum or signum
        self.count += 1

    @property
    def exit_status(self) -> int:
        """130 after SIGINT, 143 after SIGTERM, 0 without a signal."""
        return 0 if self.signum is None else 128 + self.signum
