"""Which arguments of a call have rows, by one declared rule; how rows are cut.

The first tensor tells how many rows there are. A tensor, an array or a list of plain
values that is as long has rows, and is cut. Every chunk gets all of anything else, and
of what `shared=` names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor

from trainkit.core.batch_norm.layers import listed
from trainkit.core.nested import Build, Field, is_dense, is_list, length_of, take_apart
from trainkit.core.split.partition import Span, even_runs
from trainkit.errors import TrainkitError

BY_PLACE = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
OPEN = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


@dataclass(eq=False)
class Chunk:
    """Some rows of a call that run together.

    Attributes:
        start: the first row.
        stop: the row behind the last.
        columns: the first that it keeps, and that behind the last; None for all.
        tokens: of documents, the first, and that behind the last.
        states: the random states that it began with.
    """

    start: int
    stop: int
    columns: Span | None = None
    tokens: Span = (0, 0)
    states: Any = field(default=None, repr=False)

    def part(
        self,
        whole: Tensor,
        dim: int | None,
        multiple: int = 1,
        padded: tuple[int, ...] = (),
        unit: int = -1,
    ) -> Tensor:
        """A view of its rows of a tensor.

        Args:
            whole: of all rows.
            dim: the dimension of the rows; None for a tensor that has no rows.
            multiple: how many entries of that dimension belong to a row.
            padded: the dimensions of columns, of which it keeps its own.
            unit: -1 for rows; -2 if it has entries for each token of documents.
        """
        if dim is not None:
            start, stop = (self.tokens, (self.start, self.stop))[unit]
            whole = whole.narrow(dim, start * multiple, (stop - start) * multiple)
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
        return [Chunk(*run) for run in even_runs(num_rows, num)]

    def halve(self, num_rows: int) -> bool:
        """Memory ran out for so many rows. Returns whether chunks can be smaller."""
        first = self.cut(num_rows)[0]
        if not self.is_auto or first.stop == 1:
            return False
        self.limit = first.stop // 2
        return True


@dataclass
class ByLength:
    """How the rows of a call are sorted by length, and cut.

    Attributes:
        order: of the rows, longest first.
        chunks: blocks of rows, as places in that order, and of columns.
        spans: the columns of each row that are not padding, in that order.
        width: how many columns there are.
    """

    order: list[int]
    chunks: list[Chunk]
    spans: list[Span]
    width: int


@dataclass
class Arguments:
    """The arguments of a call, taken apart.

    Attributes:
        values: of the call.
        paths: of them, as a user writes them.
        names: of the arguments, those given by place first.
        num_by_place: how many are given by place.
        build: makes the named arguments of as many values; None if none is nested.
        rows: how many rows they have.
        cut: whether each has rows.
        devices: of the tensors.
        padded: the dimensions of each whose columns chunks leave out.
        by_length: how rows are sorted, if they are.
        sizes: of chunks that leave out no columns; None: as of other calls.
        by: what tells rows apart that are documents.
    """

    values: list[Any]
    paths: list[str]
    names: list[str]
    num_by_place: int
    build: Build | None
    rows: int
    cut: list[bool]
    devices: set[torch.device]
    padded: list[tuple[int, ...]]
    by_length: ByLength | None = None
    sizes: Sizes | None = None
    by: str | None = None

    def chunks(self, sizes: Sizes) -> list[Chunk]:
        """In which its rows run."""
        return self.by_length.chunks if self.by_length else sizes.cut(self.rows)

    def chunk(self, start: int, stop: int) -> Chunk:
        """Some of its rows."""
        return Chunk(start, stop)

    def places(self, rows: Sequence[int], unit: int) -> Sequence[int]:
        """Where some rows are, or (unit -2) their tokens."""
        return rows

    def counts(self, rows: Sequence[int]) -> tuple[int, ...]:
        """How many some rows are; if they are documents, their tokens before."""
        return (len(rows),)

    def call(self, function: Callable[..., Any], values: Sequence[Any]) -> Any:
        """Call a function with other values in place of its own."""
        given, num = values, self.num_by_place
        if self.build is not None:
            given = list(self.build(iter(values)).values())
        return function(
            *given[:num], **dict(zip(self.names[num:], given[num:], strict=True))
        )

    def of(self, chunk: Chunk, values: Sequence[Any]) -> list[Any]:
        """The values that a chunk gets."""
        found = []
        for index, value in enumerate(values):
            if isinstance(value, Tensor):
                value = self.part(value, index, chunk)
            elif self.cut[index]:
                value = value[chunk.start : chunk.stop]
            found.append(value)
        return found

    def part(self, whole: Tensor, index: int, chunk: Chunk) -> Tensor:
        """A view of what a chunk has of the argument at a place."""
        return chunk.part(whole, 0 if self.cut[index] else None, 1, self.padded[index])

    def few(self, rows: Sequence[int]) -> Arguments:
        """The arguments of a call with some rows, in this order."""
        return replace(self, values=self.taken(rows), rows=len(rows))

    def taken(self, rows: Sequence[int]) -> list[Any]:
        """The values of some rows, in this order, without their graph."""
        return [
            reordered(value.detach() if isinstance(value, Tensor) else value, rows)
            if is_cut
            else value
            for value, is_cut in zip(self.values, self.cut, strict=True)
        ]


class Signature:
    """The names of a function's arguments, and those of them that are shared.

    Args:
        function: which is called.
        shared: paths of the arguments that every chunk gets whole.
        module: the name of what is cut, for messages.
    """

    def __init__(
        self, function: Callable[..., Any], shared: Collection[str], module: str
    ) -> None:
        try:
            arguments = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            arguments = []
        self._by_place = [each.name for each in arguments if each.kind in BY_PLACE]
        self._shared, self._module = frozenset(shared), module
        is_open = any(each.kind in OPEN for each in arguments) or not arguments
        names = [each.name for each in arguments]
        for path in shared:
            if not is_open and path.partition(".")[0] not in names:
                raise TrainkitError(
                    f"{module}: shared= must name its arguments, received {path!r}. "
                    f"They are {listed(names)}."
                )

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Take the arguments of a call apart, and find which have rows."""
        names = [*self._by_place[: len(args)]]
        names += map(str, range(len(names), len(args)))
        if not kwargs.keys().isdisjoint(names):
            names = [str(place) for place in range(len(args))]  # Python will say it
        given = {**dict(zip(names, args, strict=True)), **kwargs}
        fields, build = take_apart(given, _is_column)
        paths, values = [f.path for f in fields], [f.value for f in fields]
        rows = self._num_rows(fields)
        cut = [
            length_of(value) == rows and not (self._shared and self.is_shared(path))
            for path, value in fields
        ]
        return Arguments(
            values,
            paths,
            names=list(given),
            num_by_place=len(args),
            build=None if paths == list(given) else build,
            rows=rows,
            cut=cut,
            devices={each.device for each in values if isinstance(each, Tensor)},
            padded=[()] * len(values),
        )

    def _num_rows(self, fields: Sequence[Field]) -> int:
        """The length of the first tensor that is not shared; 1 if there is none."""
        for path, value in fields:
            if not isinstance(value, Tensor) or not value.ndim:
                continue
            if self._shared and self.is_shared(path):
                continue
            if not is_dense(value):
                kind = "nested" if value.is_nested else str(value.layout)
                raise TrainkitError(
                    f"{self._module}: its rows must be those of a dense tensor, and "
                    f"{path} is a {kind} tensor. Pad it, or name another module."
                )
            return value.shape[0]
        return 1

    def is_shared(self, path: str) -> bool:
        """Whether every chunk gets all of the argument at a path."""
        parts = path.split(".")
        return any(".".join(parts[: n + 1]) in self._shared for n in range(len(parts)))


def _is_column(path: str, value: Any) -> bool:
    """Whether a container is a list of plain values, which may be those of rows."""
    return is_list(value) and all(
        each is None or isinstance(each, str | int | float) for each in value
    )


def reordered(value: Any, rows: Sequence[int]) -> Any:
    """Some rows of an argument that has rows, in this order."""
    if isinstance(value, Tensor):
        index = torch.tensor(rows).to(value.device, non_blocking=True)
        return value.index_select(0, index)
    if is_list(value):
        return type(value)([value[row] for row in rows])
    return value[list(rows)]
