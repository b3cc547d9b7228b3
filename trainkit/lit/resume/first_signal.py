"""Signals that ask a run to stop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

PREEMPTION = tuple(
    signal.Signals[name]
    for name in ("SIGUSR1", "SIGUSR2")
    if name in signal.Signals.__members__
)
"""By these a cluster says that it takes the machine away: Lightning asks SLURM for the
first, submitit for either of them."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, *PREEMPTION)


class FirstSignal:
    """The first of `SIGNALS` that this process gets.

    A second Ctrl+C raises KeyboardInterrupt. A signal that the handler before has noted
    as its `heard`, and that has not ended the process, counts as the first.

    Attributes:
        heard: the signal, or 0.
    """

    def __init__(self, announcement: str, *, on_ctrl_c: str) -> None:
        """
        Args:
            announcement: what happens now; printed when the signal comes.
            on_ctrl_c: what a second Ctrl+C does; printed after a first one.
        """
        self.heard = 0
        self._announcement = announcement
        self._on_ctrl_c = on_ctrl_c
        self._process = -1
        self._earlier: dict[int, Callable[..., Any]] = {}

    def listen(self) -> None:
        """Handle the signals from now on; outside of the main thread Python forbids it.

        Within `fit`, call this once the Trainer has set its own handlers and has noted
        the earlier ones, which it restores when the run ends, however it ends.
        """
        if threading.current_thread() is threading.main_thread():
            self._process = os.getpid()
            for each in SIGNALS:
                before = signal.signal(each, self._hear)
                self.heard = self.heard or getattr(before, "heard", 0)
                is_ours = getattr(before, "__func__", None) is FirstSignal._hear
                if each in PREEMPTION and callable(before) and not is_ours:
                    self._earlier[each] = before

    def hand_on(self, number: int) -> None:
        """Call the handler that a signal of preemption had before, if it had one: those
        of Lightning and submitit put the job into the queue again."""
        if number in self._earlier:
            self._earlier[number](number, None)

    def _hear(self, number: int, frame: Any) -> None:
        if os.getpid() != self._process:
            _hear_in_worker(number)
        elif not self.heard:
            self.heard = number
            again = f"; {self._on_ctrl_c}" if number == signal.SIGINT else ""
            name = signal.Signals(number).name
            text = f"\ntrainkit | {name}: {self._announcement}{again}\n"
            os.write(2, text.encode())  # print may be what the signal interrupted
        elif number == signal.SIGINT:
            raise KeyboardInterrupt


def _hear_in_worker(number: int) -> None:
    """Handle a signal in a loader's worker, which inherits the handler.

    Ctrl+C and a cluster's signals reach it too, and it must work until the run has
    stopped; SIGTERM ends it.
    """
    if number == signal.SIGTERM:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
