"""Signals after training, which wait until the summary is written."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Callback

from trainkit.lit.resume.stop_request import SIGNALS


class Ending(Callback):
    """Handles SIGINT and SIGTERM after training.

    Lightning restores the signal handlers before it closes the loggers, which may
    upload for a long time. A SIGTERM would then end the process before the summary is
    written. This callback must be the first in the list.

    Attributes:
        is_over: whether training has ended by itself.
        heard: the first signal after training or after `listen`; 0 without one.
    """

    def __init__(self) -> None:
        self.is_over = False
        self.heard = 0

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.listen()
        self.is_over = True

    def listen(self) -> None:
        """Install the signal handlers, which Python allows in the main thread only."""
        if threading.current_thread() is threading.main_thread():
            for each in SIGNALS:
                signal.signal(each, self._hear)

    def _hear(self, number: int, frame: Any) -> None:
        if not self.heard:
            self.heard = number
            again = "; Ctrl+C again quits at once" if number == signal.SIGINT else ""
            name = signal.Signals(number).name
            text = f"\ntrainkit | {name}: training is over, writing the summary{again}"
            os.write(2, f"{text}\n".encode())  # print may be what it has interrupted
        elif number == signal.SIGINT:
            raise KeyboardInterrupt


@contextmanager
def signals_given_back() -> Iterator[None]:
    """Restore the signal handlers at the end."""
    before = {each: signal.getsignal(each) for each in SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for each, handler in before.items():
                signal.signal(each, handler)
