"""Which arguments of a call have rows: one declared rule.

The first tensor tells how many rows there are. A tensor, an array or a list of plain
values that is as long has rows, and is cut. Every chunk gets all of anything else, and
of what `shared=` names.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from inspect import Parameter
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.core.batch_norm.layers import listed
from trainkit.core.inside.chunks import Chunk
from trainkit.core.nested import Build, Field, is_array, is_list, take_apart
from trainkit.errors import TrainkitError

BY_PLACE = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
OPEN = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


class Names:
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
        self._shared = shared
        self._columns: dict[str, bool] = {}
        is_open = any(each.kind in OPEN for each in arguments) or not arguments
        names = [each.name for each in arguments]
        for path in shared:
            if not is_open and path.partition(".")[0] not in names:
                raise TrainkitError(
                    f"{module}: shared= must name its arguments, received {path!r}. "
                    f"They are {listed(names)}."
                )

    def path(self, path: str) -> str:
        """An argument's path as a user writes it: by name, or by its place.

        Args:
            path: in the pair of positional and named arguments.
        """
        kind, _, rest = path.partition(".")
        if kind == "1":
            return rest
        place, dot, inner = rest.partition(".")
        index = int(place) if place else 0
        name = self._by_place[index] if index < len(self._by_place) else place
        return f"{name}{dot}{inner}"

    def columns(self, fields: Sequence[Field], rows: int) -> set[str]:
        """The lists that have one plain value for each row, and had so in all calls
        before: a pair of numbers is as long as two rows by chance."""
        if rows < 2:
            return set()
        places = [f.path.rpartition(".")[0] for f in fields if _is_plain(f.value)]
        for place, number in Counter(places).items():
            before = self._columns.get(place, True)
            self._columns[place] = number == rows and before
        return {place for place in places if self._columns[place]}

    def is_shared(self, path: str) -> bool:
        """Whether every chunk gets the argument at a path whole."""
        parts = path.split(".") if self._shared else ()
        return any(".".join(parts[: n + 1]) in self._shared for n in range(len(parts)))


@dataclass
class Arguments:
    """The arguments of a call, taken apart.

    Attributes:
        values: of the call.
        paths: of them, as a user writes them.
        build: makes the positional and the named arguments of as many values.
        rows: how many rows they have.
        cut: whether each has rows.
        padded: the dimensions of each whose columns chunks leave out.
    """

    values: list[Any]
    paths: list[str]
    build: Build
    rows: int
    cut: list[bool]
    padded: Sequence[tuple[int, ...]] = ()

    @property
    def devices(self) -> set[torch.device]:
        return {each.device for each in self.values if isinstance(each, Tensor)}

    def of(self, chunk: Chunk, values: Sequence[Any]) -> list[Any]:
        """The values that a chunk gets."""
        found = []
        for index, (value, is_cut) in enumerate(zip(values, self.cut, strict=True)):
            if isinstance(value, Tensor):
                padded = self.padded[index] if self.padded else ()
                value = chunk.part(value, 0 if is_cut else None, 1, padded)
            elif is_cut:
                value = value[chunk.start : chunk.stop]
            found.append(value)
        return found

    def taken(self, rows: Sequence[int], values: Sequence[Any]) -> list[Any]:
        """The values of some rows, in this order, without their graph."""
        return [
            reordered(value.detach() if isinstance(value, Tensor) else value, rows)
            if is_cut
            else value
            for value, is_cut in zip(values, self.cut, strict=True)
        ]


def read_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], names: Names, module: str
) -> Arguments:
    """Take the arguments of a call apart, and find which have rows."""
    fields, build = take_apart((args, kwargs))
    paths = [names.path(each.path) for each in fields]
    rows = _num_rows(fields, paths, names, module)
    if columns := names.columns(fields, rows):
        fields, build = take_apart((args, kwargs), lambda path, _: path in columns)
        paths = [names.path(each.path) for each in fields]
    values = [each.value for each in fields]
    if len(values) == len(args) and all(map(is_, values, args)):
        build = _positional
    cut = [
        _length(value) == rows and not names.is_shared(path)
        for value, path in zip(values, paths, strict=True)
    ]
    return Arguments(values, paths, build, rows, cut)


def _num_rows(
    fields: Sequence[Field], paths: Sequence[str], names: Names, module: str
) -> int:
    """The length of the first tensor that is not shared; 1 if there is no tensor."""
    for field, path in zip(fields, paths, strict=True):
        value = field.value
        if not isinstance(value, Tensor) or not value.ndim or names.is_shared(path):
            continue
        if value.is_nested or value.layout is not torch.strided:
            kind = "nested" if value.is_nested else str(value.layout)
            raise TrainkitError(
                f"{module}: its rows must be those of a dense tensor, and {path} is a "
                f"{kind} tensor. Pad it, or name another module."
            )
        return value.shape[0]
    return 1


def _length(value: Any) -> int:
    """How many entries a value has that may be rows; -1 for other values."""
    if isinstance(value, Tensor):
        is_dense = not value.is_nested and value.layout is torch.strided
        return value.shape[0] if is_dense and value.ndim else -1
    return len(value) if is_array(value) or is_list(value) else -1


def _positional(values: Iterator[Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call that has no nested and no named ones."""
    return list(values), {}


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def reordered(value: Any, rows: Sequence[int]) -> Any:
    """Some rows of an argument that has rows, in this order."""
    if isinstance(value, Tensor):
        index = torch.tensor(rows).to(value.device, non_blocking=True)
        return value.index_select(0, index)
    if is_list(value):
        return type(value)([value[row] for row in rows])
    return value[list(rows)]


@contextlib.contextmanager
def without_cache(module: nn.Module) -> Iterator[None]:
    """Models of transformers return a cache of keys in training too, where nothing
    reads it, and its rows cannot be joined."""
    config: Any = getattr(module, "config", None)
    if getattr(config, "use_cache", False) is not True:
        yield
        return
    config.use_cache = False
    try:
        yield
    finally:
        config.use_cache = True
