"""Counts the steps that a gradient scaler skips."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class SkippedSteps:
    """Knows whether a gradient scaler has skipped a window's step.

    A scaler that finds an infinity skips the step, and its factor falls: that is
    counted on the device. Optimizers that close their windows together share the count.
    """

    def __init__(self, optimizer: Any, scaler: Any) -> None:
        self._scaler: Any = scaler
        self._device = next(
            (p.device for group in optimizer.param_groups for p in group["params"]),
            torch.device("cpu"),
        )
        self._factor_before: Tensor | None = None
        self._fell: Tensor | None = None
        self._times_fallen: Tensor | int = 0

    @property
    def num_skipped(self) -> int:
        """Steps skipped so far; waits for the device."""
        return int(self._times_fallen)

    @property
    def skipped_last(self) -> bool:
        """Whether the step of the window that closed last was skipped; waits for the
        device."""
        self.count_step()
        return self._fell is not None and bool(self._fell)

    def expect_step(self) -> None:
        """Note that a window closes, so that its step should follow."""
        self._factor_before = self._factor()

    def count_step(self) -> None:
        """Count the step that was expected, if it was skipped, once it is over."""
        if self._factor_before is not None:
            self._fell = self._factor() < self._factor_before
            self._times_fallen = self._times_fallen + self._fell.long()
            self._factor_before = None

    def close(self) -> None:
        """Release all but the numbers, when training is over."""
        self.count_step()
        self._scaler = None

    def _factor(self) -> Tensor:
        return self._scaler.scale(torch.ones((), device=self._device))
