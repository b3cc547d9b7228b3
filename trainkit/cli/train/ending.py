"""Signals after training, which wait until the summary is written."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Callback

from trainkit.lit.resume.first_signal import SIGNALS, FirstSignal


class Ending(Callback):
    """Handles the signals that ask a run to stop after training.

    Lightning restores the signal handlers before it closes the loggers, which may
    upload for a long time. A SIGTERM would then end the process before the summary is
    written. This callback must be the first in the list.

    Attributes:
        is_over: whether training has ended by itself.
        signals: the first signal after training, once they are listened to.
    """

    def __init__(self) -> None:
        self.is_over = False
        self.signals = FirstSignal(
            "training is over, writing the summary",
            on_ctrl_c="Ctrl+C again quits at once",
        )

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.signals.listen()
        self.is_over = True


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
