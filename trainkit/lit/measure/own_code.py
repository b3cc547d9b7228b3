"""The files and classes that a module's code stands in."""

from __future__ import annotations

import functools
import sys
import sysconfig
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from trainkit.core.bare import is_a, names_in
from trainkit.lit.rerun.hidden import is_of_framework

PLACES = ("stdlib", "platstdlib", "purelib", "platlib")


def owners_of(module: nn.Module) -> list[Any]:
    """The classes of a module and its parts that no framework defines, their files,
    the user's own files that these import, and the classes in them."""
    kinds = {kind: None for each in module.modules() for kind in type(each).__mro__}
    waiting: list[Any] = [k for k in kinds if not is_of_framework(k.__module__)]
    waiting += {file: None for file in map(_file_of, waiting) if file is not None}
    found = {id(each): each for each in waiting}
    while waiting:
        for value in list(names_in(waiting.pop()).values()):
            file = value if is_a(value, ModuleType) else _file_of(value)
            own = (value, file) if is_a(value, type) else (file,)
            new = [each for each in own if id(each) not in found]
            if file is not None and new and (id(file) in found or _is_own(file)):
                found.update({id(each): each for each in new})
                waiting += new
    return list(found.values())


def _file_of(value: Any) -> Any:
    # Of other objects nothing is asked: they may import what they are asked for.
    if is_a(value, type):
        name = names_in(value).get("__module__")
    elif is_a(value, FunctionType):
        name = value.__module__
    else:
        return None
    file = sys.modules.get(name) if is_a(name, str) else None
    return file if is_a(file, ModuleType) else None


def _is_own(file: ModuleType) -> bool:
    """Whether it is neither a framework nor installed."""
    path = names_in(file).get("__file__")
    if not is_a(path, str, Path) or is_of_framework(names_in(file).get("__name__")):
        return False
    return not str(path).startswith(_installed())


@functools.cache
def _installed() -> tuple[str, ...]:
    return tuple(
        str(Path(place)) for name in PLACES if (place := sysconfig.get_path(name))
    )
