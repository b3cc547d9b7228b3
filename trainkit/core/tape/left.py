"""The values of a batch that a forward leaves in attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from trainkit.core.tape.rows import NumberOfRows


@dataclass(frozen=True)
class Left:
    """A value in an attribute.

    Attributes:
        name: of the attribute, with that of its module.
        slot: of the value.
        put: puts another tensor in its place.
    """

    name: str
    slot: int
    put: Callable[[Tensor], None]


def left_in(module: nn.Module, slot_of: Callable[[Any], int | None]) -> list[Left]:
    """The values in attributes of a module, and in lists and dicts there; numbers of
    rows become those of the batch."""
    found = []
    for path, each in module.named_modules():
        for holder, key, value, name in _places(each):
            if type(value) is NumberOfRows:
                holder[key] = value.whole
            slot = slot_of(value) if isinstance(value, Tensor) else None
            if slot is not None:
                put = _putter(holder, key)
                found.append(Left(f"{path}.{name}".lstrip("."), slot, put))
    return found


def _places(module: nn.Module) -> Iterator[tuple[Any, Any, Any, str]]:
    own = vars(module)
    for holder in (own, own["_buffers"]):
        for name, value in list(holder.items()):
            yield holder, name, value, name
            if name.startswith("_") and holder is own and name in OF_TORCH:
                continue
            inside = value if isinstance(value, dict) else vars_of(value)
            if isinstance(value, list):
                inside = value
                yield from ((value, i, v, name) for i, v in enumerate(value))
            elif inside is not None:
                yield from ((inside, k, v, name) for k, v in list(inside.items()))


OF_TORCH = frozenset(vars(nn.Module()))


def vars_of(value: Any) -> dict[str, Any] | None:
    """The attributes of a plain object."""
    is_plain = not isinstance(value, nn.Module | Tensor | type | Callable)  # type: ignore[arg-type]
    return vars(value) if is_plain and hasattr(value, "__dict__") else None


def _putter(holder: Any, key: Any) -> Callable[[Tensor], None]:
    def put(tensor: Tensor) -> None:
        holder[key] = tensor

    return put
