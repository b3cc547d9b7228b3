"""The arguments of an operation, with gaps for what each chunk has instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainkit.core.tape.rows import NumberOfRows


@dataclass(frozen=True)
class Slot:
    """A gap for a value that each chunk has."""

    number: int


@dataclass(frozen=True)
class Shared:
    """A gap for a tensor that all chunks share, such as a parameter."""

    number: int


@dataclass(frozen=True)
class Nest:
    """A container with gaps."""

    make: Callable[[list[Any]], Any]
    parts: list[Any]


@dataclass
class Chunk:
    """What fills the gaps for one chunk.

    Attributes:
        values: by the numbers of their slots.
        shared: the tensors that all chunks share.
        is_small: whether it has one row less than the first chunk.
    """

    values: dict[int, Tensor]
    shared: list[Tensor]
    is_small: bool = False


def fill(part: Any, chunk: Chunk) -> Any:
    """An argument for a chunk."""
    kind = type(part)
    if kind is Slot:
        return chunk.values[part.number]
    if kind is Shared:
        return chunk.shared[part.number]
    if kind is Nest:
        return part.make([fill(each, chunk) for each in part.parts])
    if kind is NumberOfRows:
        return part.each[chunk.is_small]
    return part


def with_gaps(value: Any, gap: Callable[[Tensor], Any]) -> Any:
    """An argument in which `gap` stands for each tensor."""
    if isinstance(value, Tensor):
        return gap(value)
    if isinstance(value, tuple | list):
        parts = [with_gaps(each, gap) for each in value]
        return _nest(value, parts, _maker(value))
    if isinstance(value, dict):
        keys = list(value)
        parts = [with_gaps(each, gap) for each in value.values()]
        return _nest(value, parts, lambda found: dict(zip(keys, found, strict=True)))
    if isinstance(value, slice):
        ends = [value.start, value.stop, value.step]
        return _nest(value, [with_gaps(e, gap) for e in ends], lambda e: slice(*e))
    return value


def _nest(value: Any, parts: list[Any], make: Callable[[list[Any]], Any]) -> Any:
    has_gaps = any(
        isinstance(each, Slot | Shared | Nest | NumberOfRows) for each in parts
    )
    return Nest(make, parts) if has_gaps else value


def _maker(value: Any) -> Callable[[list[Any]], Any]:
    """What makes a list or tuple of the same kind."""
    if isinstance(value, list):
        return list
    if hasattr(value, "_make"):
        return type(value)._make
    return tuple


def gaps_in(part: Any) -> Iterator[Any]:
    """All gaps in an argument."""
    if isinstance(part, Nest):
        for each in part.parts:
            yield from gaps_in(each)
    elif isinstance(part, Slot | Shared | NumberOfRows):
        yield part


def leaves_in(value: Any) -> Iterator[Any]:
    """All that is in an argument."""
    if isinstance(value, tuple | list):
        for each in value:
            yield from leaves_in(each)
    elif isinstance(value, dict):
        yield from leaves_in([*value.values()])
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    else:
        yield value


def tensors_in(result: Any) -> list[Tensor]:
    """The tensors in what a function returns, in order."""
    return [each for each in leaves_in(result) if isinstance(each, Tensor)]


def rebuilt(result: Any, tensors: Iterator[Tensor]) -> Any:
    """What a function has returned, with other tensors in it."""
    if isinstance(result, Tensor):
        return next(tensors)
    if isinstance(result, tuple | list):
        parts = [rebuilt(each, tensors) for each in result]
        if isinstance(result, tuple) and hasattr(result, "_make"):
            return type(result)._make(parts)  # type: ignore[attr-defined]
        kind: Any = type(result)
        return kind(parts)
    return result
