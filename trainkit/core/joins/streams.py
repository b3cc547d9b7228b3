"""The streams of a CUDA device, and what is done on them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

Stream = Any
"""A queue of a device's work."""

Event = Any
"""A point in a stream."""


class Streams:
    """The streams between a CUDA device and the host, their events and copies.

    Nothing here makes the host wait.

    Args:
        device: with an index.

    Attributes:
        out: copies to the host.
        back: copies to the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.out: Stream = torch.cuda.Stream(device)
        self.back: Stream = torch.cuda.Stream(device)

    def current(self) -> Stream:
        """The stream that computes at present."""
        return torch.cuda.current_stream(self._device)

    def record(self, stream: Stream) -> Event:
        """The end of what is in a stream so far."""
        return stream.record_event()

    def wait(self, stream: Stream, event: Event) -> None:
        """Let what comes into a stream from here on wait for an event."""
        stream.wait_event(event)

    def empty_on_host(self, like: Tensor) -> Tensor:
        """Pinned memory for a tensor."""
        return torch.empty_like(like, device="cpu", pin_memory=True)

    def empty_on_device(self, like: Tensor) -> Tensor:
        """Memory for a tensor, from the current stream's pool."""
        return torch.empty_like(like, device=self._device)

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        """Copy in a stream."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)


@cache
def streams_of(device: torch.device) -> Streams:
    """The streams of a device, the same for all windows."""
    return Streams(device)
