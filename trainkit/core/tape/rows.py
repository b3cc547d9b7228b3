"""Numbers of rows, which are different ones in different chunks of a batch."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

from trainkit.core.inside.rows import Axis, Chunk, runs_of
from trainkit.errors import TrainkitError


def chunk_sizes(rows: int, size: int) -> list[int]:
    """The rows of each chunk: of two sizes that differ by one, the larger first.

    So what depends on the number of rows shows itself, in every call.

    >>> chunk_sizes(11, 4), chunk_sizes(8, 4), chunk_sizes(3, 4)
    ([4, 4, 3], [3, 3, 2], [3])

    Args:
        rows: of the batch.
        size: the most in a chunk; 1 means that one chunk has two.
    """
    number = -(-rows // size)
    if number <= 1:
        return [rows]
    more = range(number, rows)
    fewer = range(number, 0, -1)
    number = next((n for n in [*more, *fewer] if rows % n), 1)
    large = rows % number
    return [rows // number + 1] * large + [rows // number] * (number - large)


class NumberOfRows:
    """A number that follows from the number of rows in a chunk.

    Python may add, multiply and divide it by whole numbers, give it to functions of
    torch that make tensors, and compare it where all chunks and the batch answer alike.
    It is no `int`, which could get lost in a product with a float. Where an attribute
    keeps it longer than the call, it is that of the batch.

    Attributes:
        each: the number in the first chunk, in the last, and in the whole batch.
        layout: the chunks.
    """

    def __init__(self, *each: int, layout: Any = None) -> None:
        self.each, self.layout = each, layout

    @property
    def whole(self) -> int:
        return self.each[2]

    @property
    def _is_over(self) -> bool:
        return self.layout is not None and self.layout.is_over

    def __index__(self) -> int:
        """For torch, which asks before it shows the recorder a call."""
        return self.whole if self._is_over else self.each[0]

    def __repr__(self) -> str:
        return repr(self.whole)

    def __hash__(self) -> int:
        return hash(self.each)

    def _refuse(self, *_: Any) -> NoReturn:
        raise TrainkitError(
            f"exact BatchNorm: the forward computes with the number of rows "
            f"({self.each[0]} in a chunk, {self.whole} in the batch) where trainkit "
            f"cannot follow. Give it to view, reshape, expand, zeros or the like, or "
            f"compute with it outside of the module, as an int()."
        )

    def __int__(self) -> int:
        return self.whole if self._is_over else self._refuse()

    __float__ = __truediv__ = __rtruediv__ = __pow__ = __rpow__ = _refuse

    def _with(self, other: Any, of: Callable[[int, int], Any]) -> Any:
        """A number, or a yes or no, that is found for each."""
        if not isinstance(other, int | NumberOfRows):
            is_number = isinstance(other, float | Tensor)
            return self._refuse() if is_number else NotImplemented
        others = other.each if isinstance(other, NumberOfRows) else [other] * 3
        found = [of(a, b) for a, b in zip(self.each, others, strict=True)]
        if self._is_over or len(set(found)) == 1:
            return found[2]
        is_number = not isinstance(found[0], bool)
        return NumberOfRows(*found, layout=self.layout) if is_number else self._refuse()


def _method(of: Callable[[int, int], Any], *, turned: bool = False) -> Any:
    if turned:
        return lambda self, other: self._with(other, lambda a, b: of(b, a))
    return lambda self, other: self._with(other, of)


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    setattr(NumberOfRows, f"__{_name}__", _method(getattr(operator, _name)))
    setattr(
        NumberOfRows, f"__r{_name}__", _method(getattr(operator, _name), turned=True)
    )
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(NumberOfRows, f"__{_name}__", _method(getattr(operator, _name)))


class Layout:
    """The chunks of a batch.

    Attributes:
        rows: of the batch.
        sizes: the rows of each chunk, the largest first.
        last: the number of the last chunk.
        is_over: whether the forward has run.
    """

    is_over = False

    def __init__(self, rows: int, size: int) -> None:
        self.rows, self.sizes = rows, chunk_sizes(rows, size)
        self.last = len(self.sizes) - 1
        self._chunks = [Chunk((run,), (rows,)) for run in runs_of(self.sizes)]

    def is_small(self, number: int) -> bool:
        """Whether a chunk has one row less than the first."""
        return self.sizes[number] < self.sizes[0]

    def piece(self, tensor: Tensor, number: int, dim: int) -> Tensor:
        """The rows of a chunk."""
        # A single one may be all of a tensor without rows.
        return self._chunks[number].of(tensor, (Axis(dim),)) if self.last else tensor

    def room(self, piece: Tensor, dim: int) -> Tensor:
        """Room for all rows, of which the first chunk has a piece."""
        axes = (Axis(dim),) if self.last else ()
        return self._chunks[0].room(piece, axes)

    def both(self, first: Any, last: Any) -> Any:
        """What Python gets for a number, or numbers, that two chunks have.

        Returns None where these do not follow from the number of rows.
        """
        if isinstance(first, tuple | list):
            found = [self.both(a, b) for a, b in zip(first, last, strict=True)]
            return None if any(each is None for each in found) else tuple(found)
        if first == last:
            return first
        is_number = type(first) is int and type(last) is int
        if not is_number or first * self.sizes[-1] != last * self.sizes[0]:
            return None
        whole = first * self.rows // self.sizes[0]
        return NumberOfRows(first, last, whole, layout=self)

    def row_dims(self, first: Any, last: Any) -> list[int] | None:
        """The dimensions along which two shapes differ, as their rows do."""
        if len(first) != len(last):
            return None
        differing = [d for d, (a, b) in enumerate(zip(first, last)) if a != b]  # noqa: B905
        fits = all(self.both(first[d], last[d]) is not None for d in differing)
        return differing if fits else None
