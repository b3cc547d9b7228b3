"""Tensors of a GPU that wait on the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary, ref

import torch
from torch import Tensor, nn

from trainkit.core.inside.moment import version_of
from trainkit.core.joins.streams import Event, Stream, Streams, streams_of
from trainkit.core.joins.transport import (
    Kept,
    OnDevice,
    Transport,
    check_unchanged,
)

ON_DEVICE = OnDevice()

MOST = 4
"""So many tensors are held on the device while they are copied to the host."""

LEAST = 4096
"""Tensors of fewer bytes stay on the device."""


class _Copy:
    """A copy that may be on its way, and the memory at both of its ends.

    Both ends are held until the stream that computes waits for the copy. What comes
    into that stream later, and gets the memory, then comes behind the copy: it needs no
    `record_stream`, with which memory would come back only once the host has seen the
    end of the copy, so that a host far ahead would take ever more of it. So it is with
    pinned memory, whose next use is a copy behind the computing stream. Memory that
    the host itself writes to next is not ordered so; there torch's allocator of pinned
    memory waits for the copies that it has seen.

    Args:
        streams: of the device.
        tensor: its end on the device, which belongs to the computing stream.
        host: its end on the host.
        owner: the computing stream.
        event: the end of the copy.
    """

    def __init__(
        self,
        streams: Streams,
        tensor: Tensor,
        host: Tensor,
        owner: Stream,
        event: Event,
    ) -> None:
        self._streams, self._host = streams, host
        self.tensor: Tensor | None = tensor
        self.owner, self.event = owner, event
        self._version = version_of(tensor)

    def end(self) -> Tensor | None:
        """Let the computing stream wait for the copy, and hold its ends no more."""
        tensor, self.tensor = self.tensor, None
        if tensor is not None:
            self._streams.wait(self.owner, self.event)
            self._host = None
        return tensor

    def is_held_for(self, stream: Stream) -> bool:
        """Whether the tensor is still there, and belongs to a stream."""
        return self.tensor is not None and self.owner == stream

    def check(self) -> None:
        """Refuse a tensor that was changed while it was copied."""
        if self.tensor is not None:
            check_unchanged(self.tensor, self._version)

    def __del__(self) -> None:
        self.end()


class _Handle:
    """A tensor on the host.

    Attributes:
        host: the values.
        shape: of the tensor, which may repeat values.
        put: the copy to the host.
        back: the copy to the device that was asked for last.
    """

    def __init__(self, host: Tensor, shape: torch.Size, put: _Copy) -> None:
        self.host, self.shape, self.put = host, shape, put
        self.back: _Copy | None = None


class OnHost:
    """Keeps a GPU's tensors in pinned memory of the host.

    Copies run in streams of their own, beside what is computed. The host waits for
    none; the computing stream waits for a copy where it needs what it brings, or the
    memory that it frees.

    Args:
        streams: of the device.
        device: whose tensors are moved.
        stays: tensors that are on the device anyway; they and their views stay.
        most: so many tensors are held while they are copied to the host. Before another
            one, the computing stream waits for the first of them: where it is faster
            than the bus, it must not fill the device's memory.
        least: tensors of fewer bytes stay.
    """

    def __init__(
        self,
        streams: Streams,
        device: torch.device,
        stays: Iterable[Tensor] = (),
        *,
        most: int = MOST,
        least: int = LEAST,
    ) -> None:
        self._streams, self._device = streams, device
        self._most, self._least = most, least
        self._stays: WeakSet[Any] = WeakSet(x.untyped_storage() for x in stays)
        self._under_way: deque[tuple[_Copy, ref[_Handle]]] = deque()
        # Storages are the keys, and not addresses: another tensor may get an address.
        self._known: WeakKeyDictionary[Any, WeakValueDictionary[Any, _Handle]] = (
            WeakKeyDictionary()
        )

    def put(self, tensor: Tensor) -> Kept:
        """Keep a tensor, which nobody may change any more."""
        if not self._moves(tensor):
            return ON_DEVICE.put(tensor)
        storage = tensor.untyped_storage()
        own = _without_repeats(tensor)
        if own.nbytes < self._least:
            if storage.nbytes() >= self._least:
                own = own.clone()  # a small view must not hold all that it views
            return ON_DEVICE.put(own.expand(tensor.shape))
        known = self._known.setdefault(storage, WeakValueDictionary())
        key = (
            tensor.dtype,
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            version_of(tensor),
        )
        found = known.get(key)
        if found is None:
            found = known[key] = self._put(own, tensor.shape)
        return found

    def _moves(self, tensor: Tensor) -> bool:
        return (
            type(tensor) in (Tensor, nn.Parameter)
            and tensor.device == self._device
            and tensor.layout is torch.strided
            and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
            and tensor.untyped_storage() not in self._stays
        )

    def _put(self, tensor: Tensor, shape: torch.Size) -> _Handle:
        streams = self._streams
        while len(self._under_way) >= self._most:
            first, handle = self._under_way.popleft()
            if handle() is not None:
                first.check()
            first.end()
        host = streams.empty_on_host(tensor)
        if host.stride() != tensor.stride():
            tensor = tensor.clone()  # it has gaps, or its parts overlap
        now = streams.current()
        streams.wait(streams.out, streams.record(now))
        streams.copy(host, tensor, streams.out)
        copy = _Copy(streams, tensor, host, now, streams.record(streams.out))
        handle = _Handle(host, shape, copy)
        self._under_way.append((copy, ref(handle)))
        return handle

    def get(self, kept: Kept) -> Tensor:
        """The tensor, which the caller holds from here on; nobody may change it."""
        if not isinstance(kept, _Handle):
            return ON_DEVICE.get(kept)
        now = self._streams.current()
        if kept.put.is_held_for(now):
            kept.put.check()
            tensor = kept.put.tensor
        else:
            copy, kept.back = self._copy_back(kept, now), None
            tensor = copy.end()
        assert tensor is not None
        return tensor.expand(kept.shape)

    def fetch(self, kept: Iterable[Kept]) -> None:
        """Begin to copy back what is wanted next."""
        now = self._streams.current()
        for each in kept:
            if isinstance(each, _Handle) and not each.put.is_held_for(now):
                each.back = self._copy_back(each, now)

    def _copy_back(self, kept: _Handle, now: Stream) -> _Copy:
        """The copy to the device, which begins here unless it is on its way."""
        if kept.back is not None and kept.back.is_held_for(now):
            return kept.back
        streams = self._streams
        # It comes from the current stream's pool, and may still be in use there.
        tensor = streams.empty_on_device(kept.host)
        streams.wait(streams.back, streams.record(now))
        streams.wait(streams.back, kept.put.event)
        streams.copy(tensor, kept.host, streams.back)
        return _Copy(streams, tensor, kept.host, now, streams.record(streams.back))


def _without_repeats(tensor: Tensor) -> Tensor:
    """A tensor without what `expand` repeats."""
    repeated = [
        size > 1 and not step
        for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    if not any(repeated):
        return tensor
    return tensor[tuple(slice(0, 1) if each else slice(None) for each in repeated)]


def transport_to(device: torch.device, stays: Iterable[Tensor] = ()) -> Transport:
    """What keeps the tensors of a device: on the host, where it is a GPU.

    Args:
        device: on which a module runs.
        stays: tensors that are on it anyway, such as parameters and arguments.
    """
    if device.type != "cuda":
        return OnDevice()
    return OnHost(streams_of(device), device, stays)
