"""What objects hold beside their attributes: slots, cells of functions, caches."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from operator import is_
from types import CellType, FunctionType, MemberDescriptorType, MethodType
from typing import Any

from trainkit.core.bare import is_a, names_in

FRAMEWORKS = frozenset(
    "builtins torch lightning lightning_fabric pytorch_lightning lightning_utilities "
    "torchmetrics trainkit numpy typing abc".split()
)
CACHING = type(functools.lru_cache(len))
WRAPPERS = (MethodType, staticmethod, classmethod, property, functools.partial, CACHING)
EMPTY: list[Any] = []
CELL: Any = vars(CellType)["cell_contents"]


def is_of_framework(name: Any) -> bool:
    """Whether a module of this name belongs to a framework, and not to the user."""
    return is_a(name, str) and name.split(".")[0] in FRAMEWORKS


def behind(value: Any) -> list[Any]:
    """What a method, a partial or another wrapper calls, and with what; what a function
    of the user's has as defaults."""
    if is_a(value, FunctionType):
        return [*(value.__defaults__ or ()), value.__kwdefaults__]
    if is_a(value, CACHING):
        return [names_in(value).get("__wrapped__")]
    if is_a(value, functools.partial):
        return [value.func, *value.args, value.keywords]
    if is_a(value, MethodType) and is_of_framework(
        getattr(value.__func__, "__module__", None)
    ):
        return []
    return gc.get_referents(value) if is_a(value, *WRAPPERS) else []


class Place:
    """A slot of an object or a cell of a function, and what it holds now.

    Args:
        descriptor: reads and sets it.
        owner: the object or the cell.
    """

    def __init__(self, descriptor: Any, owner: Any) -> None:
        self._descriptor, self._owner = descriptor, owner
        self.kept = self._now()

    def _now(self) -> Any:
        try:
            return self._descriptor.__get__(self._owner)
        except (AttributeError, ValueError):
            return EMPTY

    def put_back(self) -> None:
        if self._now() is self.kept:
            return
        if self.kept is EMPTY:
            self._descriptor.__delete__(self._owner)
        else:
            self._descriptor.__set__(self._owner, self.kept)


def places_of(value: Any) -> list[Place]:
    """The cells of a function, or the slots of another object."""
    if is_a(value, FunctionType):
        return [Place(CELL, cell) for cell in value.__closure__ or ()]
    return [
        Place(member, value)
        for kind in type(value).__mro__
        if "__slots__" in vars(kind)
        for member in vars(kind).values()
        if is_a(member, MemberDescriptorType)
    ]


def cache_keeper(function: Any) -> Callable[[], dict[str, None]]:
    """What takes the results of later calls out of a cache; it returns the function's
    name where that cannot be done, because earlier results have fallen out."""
    lost: dict[str, None] = {getattr(function, "__qualname__", str(function)): None}
    own, entries = names_in(function), gc.get_referents(function)
    held = next(each for each in entries if type(each) is dict and each is not own)
    kept = dict(held)

    def put_back() -> dict[str, None]:
        same = map(is_, kept, held), map(is_, kept.values(), held.values())
        if not kept:
            function.cache_clear()
        elif len(held) < len(kept) or not all(map(all, same)):
            return lost
        while len(held) > len(kept):
            held.popitem()  # the latest
        return {}

    return put_back
