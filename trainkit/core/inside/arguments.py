"""The arguments of a module in chunks: their names, and what kind of call they make."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor

from trainkit.core.batch_norm.layers import listed
from trainkit.core.split.fields import is_array
from trainkit.errors import TrainkitError

BY_PLACE = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
OPEN = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


@dataclass
class Arguments:
    """The arguments of a call, taken apart.

    Attributes:
        run: the module's own forward, on a list of values.
        values: the arguments.
        paths: of them, as a user writes them.
        shared: the indices of those that every chunk gets whole.
        rows: how many rows they have.
    """

    run: Callable[[list[Any]], Any]
    values: list[Any]
    paths: list[str]
    shared: set[int]
    rows: int

    @property
    def devices(self) -> set[torch.device]:
        return {each.device for each in self.values if isinstance(each, Tensor)}


class Names:
    """The names of a function's arguments.

    Args:
        function: which is called.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        try:
            arguments = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            arguments = []
        self._by_place = [each.name for each in arguments if each.kind in BY_PLACE]
        self._all = [each.name for each in arguments]
        self._is_open = any(each.kind in OPEN for each in arguments) or not arguments

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

    def check(self, shared: Collection[str], module: str) -> None:
        """Refuse paths that lead to no argument."""
        for path in shared:
            if not self._is_open and path.partition(".")[0] not in self._all:
                raise TrainkitError(
                    f"{module}: shared= must name its arguments, received {path!r}. "
                    f"They are {listed(self._all)}."
                )


def kinds_of(values: Sequence[Any], paths: Sequence[str], rows: int) -> list[Any]:
    """What each argument has in common with those of other calls, but for its rows.

    Where a list has as many values as there are rows, each may belong to one: then
    other values are another kind, which is looked at anew.
    """
    places = [path.rpartition(".")[0] for path in paths]
    pairs = list(zip(values, places, strict=True))
    counts = Counter(place for value, place in pairs if not isinstance(value, Tensor))
    return [_kind(value, rows, counts[place] == rows) for value, place in pairs]


def _kind(value: Any, rows: int, is_of_row: bool) -> Any:
    if isinstance(value, Tensor):
        return value.ndim
    if isinstance(value, str | bool) or is_of_row and isinstance(value, int | float):
        return value
    if is_array(value) and len(value) == rows:
        return hash(value.tobytes())
    return type(value)


def refuse_layouts(
    values: Sequence[Any], paths: Sequence[str], shared: Collection[int], module: str
) -> None:
    """Refuse tensors whose rows cannot be cut, in a call that has no others."""
    for index, (value, path) in enumerate(zip(values, paths, strict=True)):
        if not isinstance(value, Tensor) or index in shared:
            continue
        if value.is_nested or value.layout is not torch.strided:
            kind = "nested" if value.is_nested else str(value.layout)
            raise TrainkitError(
                f"{module}: its rows must be those of a dense tensor, and {path} is a "
                f"{kind} tensor. Pad it, or name another module."
            )
