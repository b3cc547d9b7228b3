"""The values of a batch that a forward leaves in attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from trainkit.core.tape.rows import NumberOfRows

OF_TORCH = frozenset(vars(nn.Module())) - {"_buffers"}


@dataclass(frozen=True)
class Left:
    """A value in an attribute.

    Attributes:
        name: of the attribute, with that of its module.
        slot: of the value.
        holder: of the attribute, or the list or dict in it.
        key: of the value there.
    """

    name: str
    slot: int
    holder: Any
    key: Any


def left_in(module: nn.Module, slot_of: Callable[[Any], int | None]) -> list[Left]:
    """The values in attributes of a module, and in lists and dicts there; numbers of
    rows become those of the batch."""
    found = []
    for path, each in module.named_modules():
        for name, holder, key, value in _places(each):
            if isinstance(value, NumberOfRows):
                holder[key] = value.whole
            slot = slot_of(value) if isinstance(value, Tensor) else None
            if slot is not None:
                found.append(Left(f"{path}.{name}".lstrip("."), slot, holder, key))
    return found


def _places(module: nn.Module) -> Iterator[tuple[str, Any, Any, Any]]:
    own = vars(module)
    for name, value in [*own.items()]:
        if name in OF_TORCH:
            continue
        yield name, own, name, value
        if isinstance(value, list | dict):
            pairs = enumerate(value) if isinstance(value, list) else value.items()
            for key, each in [*pairs]:
                place = str(key) if name == "_buffers" else name
                yield place, value, key, each
