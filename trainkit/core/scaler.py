"""A gradient scaler's factor, which may change while a window is open."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ScalerFactor:
    """Keeps an open window's gradients in the factor that it was opened with.

    A scaler that serves several optimizers changes its factor when one of them steps,
    perhaps inside another's window: gradients from before and after must not be added
    as they are. Nothing here waits for the device.

    Args:
        scaler: the gradient scaler, or None.

    Attributes:
        opening: the factor of the gradients in the open window; None is 1.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self.opening: Tensor | None = None

    @property
    def has_scaler(self) -> bool:
        """Whether there is one that scales."""
        return self._scaler is not None and self._scaler.is_enabled()

    def open(self, device: torch.device) -> None:
        """A window opens."""
        self.opening = self._now(device)

    def to_opening(self, device: torch.device) -> Tensor | None:
        """What brings a gradient of now into the window's factor; None is 1."""
        now = self._now(device)
        if now is None and self.opening is None:
            return None
        opening = 1.0 if self.opening is None else self.opening.to(device)
        return opening / (torch.ones((), device=device) if now is None else now)

    def _now(self, device: torch.device) -> Tensor | None:
        if not self.has_scaler:
            return None
        return self._scaler.scale(torch.ones((), device=device))
