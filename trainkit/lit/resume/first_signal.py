"""SIGINT and SIGTERM, handled while something must not be interrupted."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class FirstSignal:
    """The first SIGINT or SIGTERM that this process gets.

    A second Ctrl+C raises KeyboardInterrupt.

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

    def listen(self) -> None:
        """Handle the signals from now on; outside of the main thread Python forbids it.

        Within `fit`, call this once the Trainer has set its own handlers and has noted
        the earlier ones, which it restores when the run ends, however it ends.
        """
        if threading.current_thread() is threading.main_thread():
            self._process = os.getpid()
            for each in SIGNALS:
                signal.signal(each, self._hear)

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

    Ctrl+C reaches it too, and it must work until the run has stopped; SIGTERM ends it.
    """
    if number == signal.SIGTERM:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
