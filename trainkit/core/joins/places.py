"""What stands in attributes, and is put back there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import cache
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Generator, Tensor, nn

from trainkit.core.inside.moment import OF_TORCH, version_of
from trainkit.core.joins.sameness import Is

Place = tuple[Is, Any]
"""A dict, such as the attributes of a module, and a key in it."""

Values = dict[Place, Any]

LISTS = (list, set, deque)
SIMPLE = (bool, int, float, complex, str, bytes)
FUNCTIONS = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
MISSING = object()
HERE = object()
"""The key of a place that each dict has which is looked into."""

LIBRARIES = frozenset(
    "builtins functools lightning lightning_fabric lightning_utilities numpy "
    "pytorch_lightning torch torchmetrics trainkit".split()
)
"""Objects of these are not looked into."""

MOST = 1000
"""Longer lists and dicts are data, and what is in them is not looked at."""


@cache
def _is_metric(kind: type) -> bool:
    """Whether a class is a metric of torchmetrics: it adds up whatever it gets."""
    return any(each.__name__ == "Metric" for each in kind.__mro__)


def look(module: nn.Module) -> Values:
    """The attributes of a module, of those in it, and of objects there; and dicts."""
    found: Values = {}
    for each in module.modules():
        if _is_metric(type(each)):
            continue
        attributes = vars(each)
        own, left_out = Is(attributes), computed(each)
        found[own, HERE] = True
        for name, value in attributes.items():
            if name in OF_TORCH or name == "forward" or name in left_out:
                continue
            found[own, name] = held(value)
            if type(value) not in SIMPLE:
                _look_into(value, 2, found)
    return found


def _look_into(value: Any, depth: int, found: Values) -> None:
    inner = value if isinstance(value, dict) else _attributes_of(value)
    if inner is None or len(inner) > MOST:
        return
    own = Is(inner)
    found[own, HERE] = True
    for key, each in inner.items():
        found[own, key] = held(each)
        if depth > 1 and type(each) not in SIMPLE:
            _look_into(each, depth - 1, found)


def computed(module: nn.Module) -> set[str]:
    """The weights that pruning or weight_norm computes before each use."""
    own = module._parameters
    pruned = {name[:-5] for name in own if name.endswith("_orig")}
    return pruned | {n[:-2] for n in own if n.endswith("_g") and f"{n[:-2]}_v" in own}


def changed(before: Values, now: Values) -> list[Place]:
    """What is other than before. A dict that is new or gone is one change, that of
    the place where it stands, and what is in it none."""
    return [
        place
        for place in {**before, **now}
        if not is_same(before.get(place, MISSING), now.get(place, MISSING))
        and all(
            (place[0], HERE) in each or isinstance(place[0].held, nn.Parameter)
            for each in (before, now)
        )
    ]


def written(before: Values, now: Values) -> list[Place]:
    """Where a tensor stands that was changed in place."""
    return [
        place
        for place, value in now.items()
        if isinstance(value, Written) and value.is_changed(before.get(place))
    ]


def paths_of(module: nn.Module) -> dict[int, str]:
    """The names of dicts with attributes, by their ids."""
    found: dict[int, str] = {}

    def add(path: str, value: Any, depth: int) -> None:
        inner = value if isinstance(value, dict) else _attributes_of(value)
        if inner is not None and len(inner) <= MOST:
            found.setdefault(id(inner), path)
            for key, each in inner.items() if depth else ():
                add(f"{path}.{key}", each, depth - 1)

    for path, each in module.named_modules():
        found[id(vars(each))] = path
        for name, value in vars(each).items():
            if name not in OF_TORCH:
                add(f"{path}.{name}".lstrip("."), value, 1)
    return found


def _attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object of the user's own."""
    other = (*FUNCTIONS, *LISTS, *SIMPLE, nn.Module, Tensor, Generator)
    if value is None or isinstance(value, other):
        return None
    if type(value).__module__.partition(".")[0] in LIBRARIES:
        return None
    return getattr(value, "__dict__", None)


def look_at(places: Iterable[Place]) -> Values:
    """What stands at some places."""
    found: Values = {}
    for place in places:
        holder, key = place[0].held, place[1]
        found[place[0], HERE] = True
        if isinstance(holder, nn.Parameter):
            found[place] = holder.requires_grad
        elif key in holder:
            found[place] = held(holder[key])
    return found


def put(place: Place, value: Any) -> None:
    """Put a value back where it stood."""
    holder, key = place[0].held, place[1]
    if isinstance(holder, nn.Parameter):
        holder.requires_grad_(value)
    elif value is MISSING:
        holder.pop(key, None)
    elif isinstance(value, _Contents):
        holder[key] = value.value
        value.put_back()
    else:
        holder[key] = value.value if isinstance(value, Written) else value


def names_of(module: nn.Module, places: Iterable[Place]) -> list[str]:
    """The names of attributes, for messages."""
    if not (places := list(places)):
        return []
    paths = paths_of(module)
    named = {id(each): path for path, each in module.named_parameters()}
    found = []
    for own, key in places:
        path = named.get(id(own.held), "") or paths.get(id(own.held), "")
        found.append(path if key == "data" else f"{path}.{key}".lstrip("."))
    return found


def held(value: Any) -> Any:
    """A value with what is needed to see its changes, and to undo them."""
    if isinstance(value, Tensor):
        return Written(value)
    return _Contents(value) if isinstance(value, LISTS) else value


class Written:
    """A tensor, and how often it was changed in place."""

    def __init__(self, value: Tensor) -> None:
        self.value, self.version = value, version_of(value)

    def is_changed(self, before: Any) -> bool:
        return (
            isinstance(before, Written)
            and self.value is before.value
            and self.version != before.version
        )


class Weights:
    """A parameter that trains, and where and how often it was written."""

    def __init__(self, parameter: Any) -> None:
        self.now = id(parameter), version_of(parameter), parameter.data_ptr()


class _Contents:
    """A list or set, and what is in it, also in lists there."""

    def __init__(self, value: Any) -> None:
        self.value, self.size = value, len(value)
        self.contents: list[Any] | None = None
        if self.size <= MOST:
            self.contents = [held(each) for each in value]

    def is_same(self, other: _Contents) -> bool:
        if self.value is not other.value or self.size != other.size:
            return False
        if self.contents is None or other.contents is None:
            return True
        pairs = zip(self.contents, other.contents, strict=True)
        return all(is_same(one, two) for one, two in pairs)

    def put_back(self) -> None:
        if self.contents is None:
            return
        inner = [each for each in self.contents if isinstance(each, _Contents)]
        for each in inner:
            each.put_back()
        wrapped = (_Contents, Written)
        held = [x.value if isinstance(x, wrapped) else x for x in self.contents]
        self.value.clear()
        fill = self.value.update if isinstance(self.value, set) else self.value.extend
        fill(held)


def is_same(one: Any, other: Any) -> bool:
    """Whether both are one object, with the same content, or simple and equal."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, _Contents):
        return one.is_same(other)
    if isinstance(one, Weights):
        return one.now == other.now
    if isinstance(one, Written):
        return one.value is other.value
    return isinstance(one, SIMPLE) and one == other
