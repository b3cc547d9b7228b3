"""Micro-batches on their way to the device, each while the one before computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.core.batches import tensors
from trainkit.core.split.fields import with_tensors


def moved(
    batches: Sequence[Any], move: Callable[[Any], Any], device: torch.device
) -> Iterator[Any]:
    """Yield each batch on the device, with the next one already under way.

    On a GPU the copy runs from pinned memory on a stream of its own; the stream that
    computes waits for it, the host does not.

    Args:
        batches: on the host.
        move: brings one to the device, with all hooks of the module that belong to it.
        device: where they go.
    """
    if device.type != "cuda":
        for batch in batches:  # in a map, a StopIteration of a hook would end all
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
