"""The rows of a call, cut into chunks, and how large a chunk may be."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import Tensor

Span = tuple[int, int]


@dataclass(eq=False)
class Chunk:
    """Some rows of a call that run together.

    Attributes:
        start: the first row.
        stop: the row behind the last.
        columns: the first that it keeps, and that behind the last; None for all.
        states: the random states that it began with.
    """

    start: int
    stop: int
    columns: Span | None = None
    states: Any = field(default=None, repr=False)

    def part(
        self,
        whole: Tensor,
        dim: int | None,
        multiple: int = 1,
        padded: tuple[int, ...] = (),
    ) -> Tensor:
        """A view of its rows of a tensor.

        Args:
            whole: of all rows.
            dim: the dimension of the rows; None for a tensor that has no rows.
            multiple: how many entries of that dimension belong to a row.
            padded: the dimensions of columns, of which it keeps its own.
        """
        if dim is not None:
            length = (self.stop - self.start) * multiple
            whole = whole.narrow(dim, self.start * multiple, length)
        if self.columns is not None:
            first, behind = self.columns
            for each in padded:
                whole = whole.narrow(each, first, behind - first)
        return whole


class Sizes:
    """How many rows a chunk may have; fewer once memory ran out.

    Args:
        size: the most rows; None: as many as fit.

    Attributes:
        limit: the most rows at present; None for all.
        is_auto: whether memory errors are answered by smaller chunks.
    """

    def __init__(self, size: int | None = None) -> None:
        self.is_auto = size is None
        self.limit = size

    def cut(self, num_rows: int) -> list[Chunk]:
        """All rows in order, in as few chunks as the limit allows, of like size."""
        num = -(-num_rows // (self.limit or num_rows))
        size, more = divmod(num_rows, num)
        bounds = [number * size + min(number, more) for number in range(num + 1)]
        return [Chunk(start, stop) for start, stop in pairwise(bounds)]

    def halve(self, num_rows: int) -> bool:
        """Memory ran out for so many rows. Returns whether chunks can be smaller."""
        first = self.cut(num_rows)[0]
        if not self.is_auto or first.stop == 1:
            return False
        self.limit = first.stop // 2
        return True
