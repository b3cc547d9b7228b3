"""Reading numbers from a device without waiting for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LateReading:
    """A device tensor on its way to the host, read when it has arrived.

    From a GPU the copy goes into pinned memory, after the work already queued, and
    `arrived` never waits. A CPU tensor has arrived at once.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: Any = None
        if tensor.is_cuda:
            self._host = torch.empty(
                tensor.shape, dtype=tensor.dtype, pin_memory=True
            ).copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))
        else:
            self._host = tensor

    @property
    def arrived(self) -> bool:
        return self._event is None or self._event.query()

    def values(self) -> Any:
        """The numbers, nested as in the tensor; waits if they have not arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()
