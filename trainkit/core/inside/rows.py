"""Which arguments of a call have rows, by one declared rule; how rows are cut.

The first tensor tells how many rows there are. A tensor, an array or a list of plain
values that is as long has rows, and is cut. Every chunk gets all of anything else, and
of what `shared=` names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from inspect import Parameter
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainkit.core.batch_norm.layers import listed
from trainkit.core.nested import Build, Field, is_dense, is_list, length_of, take_apart
from trainkit.errors import TrainkitError

BY_PLACE = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
OPEN = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)

ROWS, TOKENS, COLUMNS = range(3)
"""Of what a chunk has some: rows; their tokens, if they are documents; and the columns
that are not padding in all of them."""


class Axis(NamedTuple):
    """A dimension of a tensor, of which each chunk has its places.

    Attributes:
        dim: the dimension.
        unit: of what the places are. As many entries belong to each as fit.
    """

    dim: int
    unit: int = ROWS


Axes = tuple[Axis, ...]
"""Of a tensor: that of its rows or tokens, then that of columns. Without any, all
chunks share it."""


class Chunk:
    """Some rows of a call that run together.

    Args:
        places: those of its rows, tokens and columns in the call, in its order; a range
            where they are neighbours.
        totals: how many of each the call has.

    Attributes:
        places: the same.
        rows: the places of its rows.
        states: the random states that it began with.
    """

    def __init__(self, places: Sequence[Sequence[int]], totals: Sequence[int]) -> None:
        self.places, self._totals, self.rows = places, totals, places[ROWS]
        self.states: Any = None

    @property
    def counts(self) -> dict[int, int]:
        """How many it has by units, of documents how many tokens before."""
        units = (unit for unit in (TOKENS, ROWS) if self.places[unit])
        return {unit: len(self.places[unit]) for unit in units}

    def of(self, whole: Tensor, axes: Axes) -> Tensor:
        """What it has of a tensor of the call; a view, if these are neighbours."""
        for dim, unit in axes:
            places, each = self.places[unit], whole.shape[dim] // self._totals[unit]
            if isinstance(places, range):
                whole = whole.narrow(dim, places.start * each, len(places) * each)
            else:
                index = torch.as_tensor(places, device=whole.device)
                parts = whole.unflatten(dim, (-1, each)).index_select(dim, index)
                whole = parts.flatten(dim, dim + 1)
        return whole

    def room(self, part: Tensor, axes: Axes) -> Tensor:
        """Room for a tensor of the whole call, of which it has a part."""
        shape = list(part.shape)
        for dim, unit in axes:
            each = shape[dim] // len(self.places[unit])
            shape[dim] = each * self._totals[unit]
        room = part.new_empty(shape)
        if part.ndim == 4 and not part.is_contiguous():
            if part.is_contiguous(memory_format=torch.channels_last):
                room = room.to(memory_format=torch.channels_last)
        return room.zero_() if len(axes) > 1 else room


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

    def runs(self, num_rows: int) -> list[range]:
        """All rows in order, in as few chunks as the limit allows: their sizes differ
        by at most one, and the first is the largest.

        >>> Sizes(4).runs(10)
        [range(0, 4), range(4, 7), range(7, 10)]
        """
        num_runs = -(-num_rows // (self.limit or num_rows))
        size, larger = divmod(num_rows, num_runs)
        return runs_of([size + 1] * larger + [size] * (num_runs - larger))

    def halve(self, num_rows: int) -> bool:
        """Memory ran out for so many rows. Returns whether chunks can be smaller."""
        most = len(self.runs(num_rows)[0])
        if not self.is_auto or most == 1:
            return False
        self.limit = most // 2
        return True


def runs_of(sizes: Sequence[int]) -> list[range]:
    """The places of neighbours, of which each has so many."""
    return [range(*both) for both in pairwise(accumulate(sizes, initial=0))]


@dataclass
class Arguments:
    """The arguments of a call, taken apart.

    Attributes:
        values: of the call.
        paths: of them, as a user writes them.
        names: of the arguments, those given by place first.
        num_by_place: how many are given by place.
        build: makes the named arguments of as many values; None if none is nested.
        totals: how many rows, tokens and columns they have; 0 where that is unknown.
        whole: whether each value is shared, as a user says.
        axes: of each value.
        devices: of the tensors.
        parts: the chunks, where no number of rows alone says which.
        sizes: of chunks, if they are others than those of other calls.
        by: what tells rows apart that are documents.
    """

    values: list[Any]
    paths: list[str]
    names: list[str]
    num_by_place: int
    build: Build | None
    totals: tuple[int, int, int]
    whole: list[bool]
    axes: list[Axes]
    devices: set[torch.device]
    parts: list[Chunk] | None = None
    sizes: Sizes | None = None
    by: str | None = None

    @property
    def rows(self) -> int:
        """How many rows they have."""
        return self.totals[ROWS]

    @property
    def width(self) -> int:
        """How many columns they have, if chunks leave out padding."""
        return self.totals[COLUMNS]

    def has_rows(self, index: int) -> bool:
        """Whether a value has rows, or tokens of documents."""
        return any([axis.unit != COLUMNS for axis in self.axes[index]])

    def chunks(self, sizes: Sizes) -> list[Chunk]:
        """In which its rows run."""
        return self.parts or [self.chunk(run) for run in sizes.runs(self.rows)]

    def chunk(self, rows: Sequence[int]) -> Chunk:
        """Some of its rows, with all columns."""
        return Chunk((rows, (), range(self.width)), self.totals)

    def of(self, chunk: Chunk, values: Sequence[Any]) -> list[Any]:
        """What a chunk has of the values of the call."""
        found = []
        for value, axes in zip(values, self.axes, strict=True):
            if isinstance(value, Tensor):
                value = chunk.of(value, axes)
            elif axes and is_list(value):
                value = type(value)([value[row] for row in chunk.rows])
            elif axes:
                value = value[list(chunk.rows)]  # an array
            found.append(value)
        return found

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
        whole = [bool(self._shared) and self._is_shared(x.path) for x in fields]
        pairs = list(zip(fields, whole, strict=True))
        rows = self._num_rows([field for field, is_whole in pairs if not is_whole])
        paths, values, axes = list[str](), list[Any](), list[Axes]()
        for (path, value), is_whole in pairs:
            paths.append(path)
            values.append(value)
            has_rows = not is_whole and length_of(value) == rows
            axes.append((Axis(0),) if has_rows else ())
        return Arguments(
            values,
            paths,
            names=list(given),
            num_by_place=len(args),
            build=None if paths == list(given) else build,
            totals=(rows, 0, 0),
            whole=whole,
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

    def _is_shared(self, path: str) -> bool:
        """Whether every chunk gets all of the argument at a path."""
        parts = path.split(".")
        return any(".".join(parts[: n + 1]) in self._shared for n in range(len(parts)))


def _is_column(path: str, value: Any) -> bool:
    """Whether a container is a list of plain values, which may be those of rows."""
    return is_list(value) and all(
        each is None or isinstance(each, str | int | float) for each in value
    )
