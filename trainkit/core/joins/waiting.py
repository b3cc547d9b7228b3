"""What waits of one micro-batch between the segments of a forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from trainkit.core.joins.program import Untraceable
from trainkit.core.joins.transport import Kept, OnDevice, Transport
from trainkit.core.nested import take_apart

ON_DEVICE = OnDevice()


class Waiting:
    """The values and gradients of one micro-batch, by name.

    Args:
        arguments: the micro-batch's own, which stay where they are.
        transport: keeps all other tensors.

    Attributes:
        put_back: for each segment, what restores the random states it began with.
    """

    def __init__(self, arguments: Mapping[str, Tensor], transport: Transport) -> None:
        self._transport = transport
        self._kept: dict[str, tuple[Transport, Kept]] = {
            name: (ON_DEVICE, ON_DEVICE.put(value)) for name, value in arguments.items()
        }
        self._constants: dict[str, Any] = {}
        self._gradients: dict[str, Kept] = {}
        self.put_back: list[Callable[[], None]] = []

    def hold(self, name: str, value: Any) -> None:
        """Keep a value: a tensor, or what holds none."""
        if isinstance(value, Tensor):
            kept = self._transport.put(value.detach())
            self._kept[name] = self._transport, kept
            return
        if any(isinstance(field.value, Tensor) for field in take_apart(value)[0]):
            raise Untraceable(
                f"a {type(value).__name__} of tensors is passed on over a layer"
            )
        self._constants[name] = value

    def get(self, name: str) -> Any:
        """The value, which nobody may change."""
        if name in self._constants:
            return self._constants[name]
        transport, kept = self._kept[name]
        return transport.get(kept)

    def fetch(self, names: Iterable[str]) -> None:
        """Say that these values are wanted next."""
        self._transport.fetch(
            self._kept[name][1]
            for name in names
            if name in self._kept and self._kept[name][0] is self._transport
        )

    def fetch_gradients(self, names: Iterable[str]) -> None:
        """Say that the gradients of these values are wanted next."""
        held = self._gradients
        self._transport.fetch(held[name] for name in names if name in held)

    def drop(self, name: str) -> None:
        """Forget a value that no one needs any more."""
        self._kept.pop(name, None)

    def add(self, name: str, gradient: Tensor) -> None:
        """Add to the gradient of a value."""
        before = self._gradients.get(name)
        if before is not None:
            gradient = self._transport.get(before) + gradient
        self._gradients[name] = self._transport.put(gradient)

    def gradient(self, name: str) -> Tensor | None:
        """The gradient of a value so far, which is forgotten here."""
        kept = self._gradients.pop(name, None)
        return None if kept is None else self._transport.get(kept)
