"""Models and a callback for trainings in processes of their own, which they disturb."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from recipes.code_lm import CodeLM


class Signalled(CodeLM):
    """Sends `TEST_SIGNAL` to the ranks named in `TEST_RANKS`, once, inside a window."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        ranks = os.environ.get("TEST_RANKS", "").split(",")
        if batch_idx == 3 and str(self.global_rank) in ranks:
            os.kill(os.getpid(), signal.Signals[os.environ["TEST_SIGNAL"]])


class SecondRankFails(CodeLM):
    """Its second rank fails when a step has been taken."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 1 and self.trainer.global_step == 1:
            raise RuntimeError("the second rank is broken")


class KilledOnce(CodeLM):
    """Its second rank is killed in the second window, if none has been before."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        was = Path("killed")
        if self.global_rank == 1 and batch_idx == 3 and not was.exists():
            was.touch()
            os.kill(os.getpid(), signal.SIGKILL)


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
