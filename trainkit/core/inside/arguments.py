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
from trainkit.core.nested import is_array, take_apart
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


class Watched:
    """Shows what a run puts into its arguments, of which each chunk gets a copy.

    Args:
        given: the arguments, in order.
    """

    def __init__(self, given: Sequence[Any]) -> None:
        self._given = {id(value) for value in given}
        self._objects = [(x, _held_by(x)) for x in given if hasattr(x, "__dict__")]

    def changed(self, containers: Any, found: Any) -> set[str]:
        """The kinds of objects, and the places in containers, that were changed; but
        for what is returned as well.

        Args:
            containers: which hold the arguments.
            found: what the run has returned.
        """
        known = self._given | {id(field.value) for field in take_apart(found)[0]}
        places = [x.path for x in take_apart(containers)[0] if id(x.value) not in known]
        return {
            *(f"[{place.rpartition('.')[2]!r}]" for place in places),
            *(type(x).__name__ for x, held in self._objects if held != _held_by(x)),
        }


def _held_by(value: Any) -> Any:
    """What stands in an object's attributes; nothing of tensors and modules."""
    if isinstance(value, Tensor | torch.nn.Module | type) or callable(value):
        return None
    return {
        name: x if isinstance(x, int | float | str) else (id(x), _length(x))
        for name, x in vars(value).items()
    }


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list | dict | set) else 0


def lists_of(call: Arguments) -> dict[str, list[int]]:
    """The arguments that are entries of a list and no tensors, by the list's path; an
    array counts as a list of one."""
    held: dict[str, list[int]] = {}
    for index, (path, value) in enumerate(zip(call.paths, call.values, strict=True)):
        place, _, last = path.rpartition(".")
        if index in call.shared or isinstance(value, Tensor):
            continue
        if is_array(value):
            held[path] = [index]
        elif place and last.isdigit():
            held.setdefault(place, []).append(index)
    return held


def length_of(call: Arguments, at: Sequence[int]) -> int:
    """How many entries a list or an array has, by its indices among the arguments."""
    value = call.values[at[0]]
    return len(value) if is_array(value) else len(at)


def reversed_list(call: Arguments, at: Sequence[int]) -> dict[int, Any]:
    """The entries of a list or an array in reversed order, by their indices."""
    values = [call.values[index] for index in at]
    if is_array(values[0]):
        return {at[0]: values[0][::-1].copy()}
    return dict(zip(at, values[::-1], strict=True))


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
