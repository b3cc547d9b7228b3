"""Whether somebody has asked the run to stop, as all ranks know it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from trainkit.core.checks import LateReading
from trainkit.lit.resume.first_signal import FirstSignal


class StopRequest:
    """The first signal that asks the run to stop, and its news for the other ranks.

    Attributes:
        signals: the first of them that this process gets.
        agreed: the signal by which all ranks stop, or 0.
    """

    def __init__(self) -> None:
        self.signals = FirstSignal(
            "stopping after this batch",
            on_ctrl_c="Ctrl+C again stops now, saves nothing",
        )
        self.agreed = 0
        self._reading: LateReading | None = None

    def exchange(self, trainer: Any, *, wait: bool = False) -> None:
        """Bring `agreed` up to date; every rank must call this.

        Several ranks know of a signal one call later, so that none waits for the
        device.

        Args:
            trainer: whose ranks.
            wait: know it with this call.
        """
        if trainer.world_size == 1 or not dist.is_initialized():
            self.agree_alone()
            return
        if self._reading is not None:
            self.agreed = int(self._reading.values())
        heard = torch.tensor(self.signals.heard, device=trainer.strategy.root_device)
        dist.all_reduce(heard, op=dist.ReduceOp.MAX)
        self._reading = LateReading(heard)
        if wait:
            self.agreed = int(self._reading.values())

    def agree_alone(self) -> None:
        """Bring `agreed` up to date without the other ranks: the signal heard here."""
        self.agreed = self.signals.heard
