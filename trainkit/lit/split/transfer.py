"""Micro-batches on their way to the device, each while the one before computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.core.nested import tensors, with_tensors


def moved(
    batches: Sequence[Any], move: Callable[[Any], Any], device: torch.device
) -> Iterator[Any]:
    """Yield each batch on the device while the next one is copied.

    On a GPU the copy runs from pinned memory on a stream of its own. The stream that
    computes waits for it; the host does not.

    Args:
        batches: the batches on the host.
        move: brings one to the device, with the module's hooks for it.
        device: the device.
    """
    if device.type != "cuda":
        for batch in batches:  # in a map(), a hook's StopIteration would be lost
            yield move(batch)
        return
    copies = torch.cuda.Stream(device)
    coming = _begin(batches[0], move, copies)
    for following in [*batches[1:], None]:
        batch, arrived = coming
        computes = torch.cuda.current_stream(device)
        computes.wait_event(arrived)
        for tensor in tensors(batch):
            if tensor.is_cuda:
                tensor.record_stream(computes)  # not to be reused while it is read
        if following is not None:
            coming = _begin(following, move, copies)
        yield batch


def _begin(batch: Any, move: Callable[[Any], Any], stream: Any) -> tuple[Any, Any]:
    pinned = with_tensors(batch, _pinned)
    with torch.cuda.stream(stream):
        on_device = move(pinned)
        arrived = torch.cuda.Event()
        arrived.record(stream)
    return on_device, arrived


def _pinned(tensor: Tensor) -> Tensor:
    is_plain = tensor.is_cpu and tensor.layout == torch.strided
    return tensor.pin_memory() if is_plain else tensor
