"""The values that cross a layer: on the host where a GPU computes, else as they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Store:
    """The values of each chunk, by the numbers of their slots.

    The values of a GPU are kept in pinned memory of the host. Copies run on the stream
    that computes, between its kernels: so they are in order without an event, and torch
    gives pinned memory to another tensor only once the copy has ended. The host does
    not wait.

    Args:
        num_chunks: how many there are.
        device: that computes them.

    Attributes:
        copies: whether what is kept is a copy.
    """

    def __init__(self, num_chunks: int, device: torch.device) -> None:
        self.device, self.copies = device, device.type == "cuda"
        self._kept: list[dict[int, Any]] = [{} for _ in range(num_chunks)]
        self._places: dict[int, int] = {}

    def _to_host(self, tensor: Tensor) -> Any:
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return host.copy_(tensor.detach(), non_blocking=True), tensor.device

    def _from_host(self, kept: Any) -> Tensor:
        host, device = kept
        return host.to(device, non_blocking=True)

    def has(self, chunk: int, slot: int) -> bool:
        return slot in self._kept[chunk]

    def put(self, chunk: int, slot: int, tensor: Tensor) -> None:
        kept = self._to_host(tensor) if self.copies else tensor.detach()
        self._kept[chunk][slot] = kept
        if chunk == 0:
            self._places[slot] = _place(tensor)

    def in_memory_of(self, tensor: Tensor) -> list[int]:
        """The slots whose values were, or are, in the memory of a tensor."""
        place = _place(tensor)
        return [s for s, each in self._places.items() if each == place and place]

    def get(self, chunk: int, slot: int) -> Tensor:
        kept = self._kept[chunk][slot]
        return self._from_host(kept) if self.copies else kept

    def pop(self, chunk: int, slot: int) -> Tensor:
        found = self.get(chunk, slot)
        del self._kept[chunk][slot]
        return found

    def add(self, chunk: int, slot: int, tensor: Tensor) -> None:
        """Add to a value, or put it."""
        if self.has(chunk, slot):
            tensor = self.pop(chunk, slot) + tensor
        self.put(chunk, slot, tensor)

    def drop(self, slots: Iterable[int]) -> None:
        """Keep these no longer, for any chunk."""
        for slot in slots:
            for kept in self._kept:
                kept.pop(slot, None)

    def slots(self) -> set[int]:
        return set().union(*self._kept)


def _place(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except NotImplementedError:  # within a transform of torch.func
        return 0


def is_in_memory_of(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors share memory, so that one is written into with the other."""
    return tensor.device == other.device and bool(
        _place(tensor) and _place(tensor) == _place(other)
    )
