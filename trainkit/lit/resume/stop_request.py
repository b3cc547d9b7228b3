"""Whether somebody has asked the run to stop, as all ranks know it."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import torch
import torch.distributed as dist

from trainkit.core.late_reading import LateReading

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Hears SIGINT and SIGTERM, and informs the other ranks.

    Attributes:
        heard: the first signal that this process got, or 0.
        agreed: the signal by which all ranks stop, or 0.
    """

    def __init__(self) -> None:
        self.heard = 0
        self.agreed = 0
        self._reading: LateReading | None = None
        self._process = -1

    def listen(self) -> None:
        """Handle the signals from now on; outside of the main thread Python forbids it.

        Call this once the Trainer has set its own handlers and has noted the earlier
        ones, which it restores when the run ends, however it ends.
        """
        if threading.current_thread() is threading.main_thread():
            self._process = os.getpid()
            for each in SIGNALS:
                signal.signal(each, self._hear)

    def look(self, trainer: Any, *, wait: bool = False) -> None:
        """Bring `agreed` up to date; every rank must call this.

        Several ranks know of a signal one call later, so that none waits for the
        device.

        Args:
            trainer: whose ranks.
            wait: know it with this call.
        """
        if trainer.world_size == 1 or not dist.is_initialized():
            self.look_alone()
            return
        if self._reading is not None:
            self.agreed = int(self._reading.values())
        heard = torch.tensor(self.heard, device=trainer.strategy.root_device)
        dist.all_reduce(heard, op=dist.ReduceOp.MAX)
        self._reading = LateReading(heard)
        if wait:
            self.agreed = int(self._reading.values())

    def look_alone(self) -> None:
        """Bring `agreed` up to date without the other ranks: the signal heard here."""
        self.agreed = self.heard

    def _hear(self, number: int, frame: Any) -> None:
        if os.getpid() != self._process:
            _hear_in_worker(number)
        elif not self.heard:
            self.heard = number
            again = ""
            if number == signal.SIGINT:
                again = "; Ctrl+C again stops at once and saves nothing"
            name = signal.Signals(number).name
            text = f"\ntrainkit | {name}: stopping after this step{again}\n"
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
