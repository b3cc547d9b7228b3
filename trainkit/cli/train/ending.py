"""A run that is over writes down how it went, whatever signal comes."""

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
    """Hears SIGINT and SIGTERM after training.

    Lightning gives the signals back before it closes the loggers, which may upload for
    long: SIGTERM would end the process there, and nobody would write down that the
    training had finished. It stands first among the callbacks, so that none of them
    comes between.

    Attributes:
        has_come: whether training has ended by itself.
        heard: the first signal that came since then, or since `listen`; or 0.
    """

    def __init__(self) -> None:
        self.has_come = False
        self.heard = 0

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.listen()
        self.has_come = True

    def listen(self) -> None:
        """Take the signals over; outside of the main thread Python forbids it."""
        if threading.current_thread() is threading.main_thread():
            for each in SIGNALS:
                signal.signal(each, self._hear)

    def _hear(self, number: int, frame: Any) -> None:
        if not self.heard:
            self.heard = number
            again = "; Ctrl+C again leaves at once" if number == signal.SIGINT else ""
            name = signal.Signals(number).name
            text = f"\ntrainkit | {name}: the training is over, and is summed up{again}"
            os.write(2, f"{text}\n".encode())  # print may be what it interrupted
        elif number == signal.SIGINT:
            raise KeyboardInterrupt


@contextmanager
def signals_given_back() -> Iterator[None]:
    """Leave the signals to whom they belonged before."""
    before = {each: signal.getsignal(each) for each in SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for each, handler in before.items():
                signal.signal(each, handler)
