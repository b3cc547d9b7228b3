"""A callback that lets a run be interrupted at a given moment."""

from __future__ import annotations

import os
import signal
from typing import Any

from lightning.pytorch import Callback


class Killer(Callback):
    """Sends this process a signal, once.

    Args:
        hook: the name of a Callback's hook.
        batch: when so many micro-batches have been trained on, or later.
        signum: what to send.
    """

    def __init__(self, *, hook: str, batch: int, signum: str) -> None:
        self.batch = batch
        self.signum = signal.Signals[signum]
        self.has_sent = False
        setattr(self, hook, self._send)

    def _send(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if not self.has_sent and trainer.fit_loop.total_batch_idx >= self.batch:
            self.has_sent = True
            os.kill(os.getpid(), self.signum)
