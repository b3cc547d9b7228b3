"""What operations depend on besides arguments: modes, autocast, random states."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

Settings = tuple[bool, tuple[tuple[bool, torch.dtype], ...]]


class Surroundings:
    """Reads and sets what operations on some device depend on.

    Args:
        device: of the batch.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._entered: Any = None
        self._kinds = sorted({"cpu", device.type} - {"meta"})

    def now(self) -> Settings:
        """Whether gradients are on, and what autocast does."""
        casts = [
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in self._kinds
        ]
        return torch.is_grad_enabled(), tuple(casts)

    def enter(self, settings: Settings, *, gradients: bool = True) -> None:
        """Set what `now` has read; without `gradients`, these stay as they are."""
        if self._entered == (settings, gradients):
            return
        self._entered = settings, gradients
        if gradients:
            torch.set_grad_enabled(settings[0])
        for kind, (is_on, dtype) in zip(self._kinds, settings[1], strict=True):
            torch.set_autocast_enabled(kind, is_on)
            torch.set_autocast_dtype(kind, dtype)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """What is set within it is put back. Autocast keeps no copies of weights, since
        one that was made without a graph would be used with it later."""
        self._entered = None
        before, caches = self.now(), torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            self.enter(before)
            self._entered = None
            torch.set_autocast_cache_enabled(caches)

    def random(self) -> tuple[Tensor, ...]:
        """The states of torch's generators."""
        if self._device.type != "cuda":
            return (torch.get_rng_state(),)
        return torch.get_rng_state(), torch.cuda.get_rng_state(self._device)

    def set_random(self, states: Any) -> None:
        """Put the generators back to these states."""
        torch.set_rng_state(states[0])
        if len(states) > 1:
            torch.cuda.set_rng_state(states[1], self._device)


def are_same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    """Whether nothing was drawn between two states."""
    return all(map(torch.equal, one, other))
