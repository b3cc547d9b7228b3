"""The rows of a call, cut into chunks, and how large a chunk may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from trainkit.core.split.partition import even_runs


@dataclass(eq=False)
class Chunk:
    """Some rows of a call that run together.

    Attributes:
        start: the first row.
        stop: the row behind the last.
        put_back: restores the random states that it began with.
        states: those states of torch's generators.
        is_on_host: whether its second pass keeps its graph in the host's memory.
        columns: the first that it keeps, and that behind the last; None for all.
    """

    start: int
    stop: int
    put_back: Callable[[], None] = field(default=lambda: None, repr=False)
    states: list[Tensor] = field(default_factory=list, repr=False)
    is_on_host: bool = False
    columns: tuple[int, int] | None = None

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    def part(
        self,
        whole: Tensor,
        dim: int,
        multiple: int,
        padded: int | Sequence[int] | None = None,
    ) -> Tensor:
        """A view of its rows of an argument or an output, or of their gradient.

        Args:
            whole: of all rows.
            dim: the dimension of the rows.
            multiple: how many entries of it belong to a row; 0 if all rows share it.
            padded: the dimensions of columns that are to be cut.
        """
        if multiple:
            whole = whole.narrow(dim, self.start * multiple, self.num_rows * multiple)
        if padded is None or self.columns is None:
            return whole
        first, behind = self.columns
        for each in (padded,) if isinstance(padded, int) else padded:
            whole = whole.narrow(each, first, behind - first)
        return whole


class Sizes:
    """How many rows a chunk may have; fewer once memory ran out.

    Args:
        size: the most rows; None: as many as fit.
        start: the first size tried, if it is to be found; default: all rows.

    Attributes:
        limit: the most rows at present; None for all.
        is_auto: whether memory errors are answered by finer chunks.
    """

    def __init__(self, size: int | None = None, *, start: int | None = None) -> None:
        self.is_auto = size is None
        self.limit = size or start

    def cut(self, start: int, stop: int) -> list[Chunk]:
        """Rows in order, in as few chunks as the limit allows, of like size."""
        rows = stop - start
        runs = even_runs(rows, -(-rows // (self.limit or max(rows, 1)))) if rows else []
        return [Chunk(start + first, start + behind) for first, behind in runs]

    def failed(self, rows: int) -> None:
        """Memory ran out with a chunk of so many rows."""
        self.limit = max(1, rows // 2)
