"""Which arguments of a call have rows, by one declared rule; how rows are cut.

The first tensor tells how many rows there are. A tensor, an array or a list of plain
values that is as long has rows, and is cut. Every chunk gets all of anything else, and
of what `shared=` names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainkit.core.batch_norm.layers import listed
from trainkit.core.nested import Build, Field, is_dense, is_list, length_of, take_apart
from trainkit.core.split.layout import Layout
from trainkit.core.split.rows import Rows
from trainkit.errors import TrainkitError

BY_PLACE = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
OPEN = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)

ROWS, TOKENS, COLUMNS = range(3)
"""Of what a chunk has a span: its rows; their tokens, if they are documents; and the
columns that are not padding in all of them."""

Span = tuple[int, int]
"""The first, and that behind the last."""


class Axis(NamedTuple):
    """A dimension of a tensor, of which each chunk has its span.

    Attributes:
        dim: the dimension.
        unit: of what the span is.
        multiple: how many entries belong to one.
    """

    dim: int
    unit: int = ROWS
    multiple: int = 1


Axes = tuple[Axis, ...]
"""Of a tensor: that of its rows or tokens, then that of columns. Without any, all
chunks share it."""


class Chunk:
    """Some rows of a call that run together.

    Attributes:
        start: the first row.
        stop: the row behind the last.
        spans: of its rows, tokens and columns.
        states: the random states that it began with.
    """

    def __init__(
        self, rows: Span, tokens: Span = (0, 0), columns: Span = (0, 0)
    ) -> None:
        self.start, self.stop = rows
        self.spans = rows, tokens, columns
        self.states: Any = None

    def part(self, whole: Tensor, axes: Axes) -> Tensor:
        """A view of what it has of a tensor of the whole call."""
        for dim, unit, multiple in axes:
            start, stop = self.spans[unit]
            whole = whole.narrow(dim, start * multiple, (stop - start) * multiple)
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

    def runs(self, num_rows: int) -> list[Span]:
        """All rows in order, in as few chunks as the limit allows: their sizes differ
        by at most one, and the first is the largest.

        >>> Sizes(4).runs(10)
        [(0, 4), (4, 7), (7, 10)]
        """
        num_runs = -(-num_rows // (self.limit or num_rows))
        size, larger = divmod(num_rows, num_runs)
        ends = [i * size + min(i, larger) for i in range(num_runs + 1)]
        return list(pairwise(ends))

    def halve(self, num_rows: int) -> bool:
        """Memory ran out for so many rows. Returns whether chunks can be smaller."""
        most = self.runs(num_rows)[0][1]
        if not self.is_auto or most == 1:
            return False
        self.limit = most // 2
        return True


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
        axes: of each value.
        devices: of the tensors.
        sizes: of chunks, if they are others than those of other calls.
        by: what tells rows apart that are documents.
        width: how many columns there are, if chunks leave out padding.
    """

    values: list[Any]
    paths: list[str]
    names: list[str]
    num_by_place: int
    build: Build | None
    rows: int
    axes: list[Axes]
    devices: set[torch.device]
    sizes: Sizes | None = None
    by: str | None = None
    width: int = 0

    def has_rows(self, index: int) -> bool:
        """Whether a value has rows, or tokens of documents."""
        return any([axis.unit != COLUMNS for axis in self.axes[index]])

    def chunks(self, sizes: Sizes) -> list[Chunk]:
        """In which its rows run."""
        return [Chunk(run) for run in sizes.runs(self.rows)]

    def chunk(self, start: int, stop: int) -> Chunk:
        """Some of its rows, with all columns."""
        return Chunk((start, stop), columns=(0, self.width))

    def places(self, rows: Sequence[int], unit: int) -> Sequence[int]:
        """Where some rows are, or their tokens."""
        return rows

    def counts(self, rows: Sequence[int]) -> dict[int, int]:
        """How many some rows are, by unit; of documents, how many tokens before."""
        return {ROWS: len(rows)}

    def run(
        self, cut: Any, values: Sequence[Any]
    ) -> tuple[list[str], list[Any], Build]:
        """What `cut.run` returns for other values in place of its own. Documents of one
        row see each other with a cache: that is refused."""
        num = self.num_by_place
        if self.build is not None:
            values = list(self.build(iter(values)).values())
        kwargs = dict(zip(self.names[num:], values[num:], strict=True))
        has_cache = self.by is not None
        return cut.run(values[:num], kwargs, has_cache=has_cache)

    def of_rows(self, rows: Sequence[int], values: Sequence[Any]) -> list[Any]:
        """What some rows have of the values of the call, in this order, as a
        micro-batch of the arguments has it."""
        fields = [Field(*each) for each in zip(self.paths, values, strict=True)]
        trims = [() if self.has_rows(place) else None for place in range(len(fields))]
        return Layout(fields, iter, trims, Rows(self.rows)).values(rows)

    def of(self, chunk: Chunk, values: Sequence[Any]) -> list[Any]:
        """The values that a chunk gets."""
        found = []
        for value, axes in zip(values, self.axes, strict=True):
            if isinstance(value, Tensor):
                value = chunk.part(value, axes)
            elif axes:
                value = value[chunk.start : chunk.stop]
            found.append(value)
        return found

    def few(self, rows: Sequence[int]) -> Arguments:
        """The arguments of a call with some rows, in this order."""
        return replace(self, values=self.taken(rows), rows=len(rows))

    def taken(self, rows: Sequence[int]) -> list[Any]:
        """The values of some rows, in this order: copies, without their graph."""
        with torch.no_grad():
            return [
                x.clone() if isinstance(x, Tensor) and self.has_rows(place) else x
                for place, x in enumerate(self.of_rows(rows, self.values))
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
        shared = set[str]()
        if self._shared:
            shared.update(each.path for each in fields if self.is_shared(each.path))
        rows = self._num_rows([each for each in fields if each.path not in shared])
        paths, values, axes = list[str](), list[Any](), list[Axes]()
        for path, value in fields:
            paths.append(path)
            values.append(value)
            has_rows = path not in shared and length_of(value) == rows
            axes.append((Axis(0),) if has_rows else ())
        return Arguments(
            values,
            paths,
            names=list(given),
            num_by_place=len(args),
            build=None if paths == list(given) else build,
            rows=rows,
            axes=axes,
            devices={each.device for each in values if isinstance(each, Tensor)},
        )

    def _num_rows(self, fields: Sequence[Field]) -> int:
        """The length of the first tensor; 1 if there is none."""
        for path, value in fields:
            if not isinstance(value, Tensor) or not value.ndim:
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
