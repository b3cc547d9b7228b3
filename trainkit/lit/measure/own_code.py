"""The files and classes that a module's code stands in."""

from __future__ import annotations

import functools
import sys
import sysconfig
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

FRAMEWORKS = frozenset(
    "builtins torch lightning lightning_fabric pytorch_lightning lightning_utilities "
    "torchmetrics trainkit numpy typing abc".split()
)
PLACES = ("stdlib", "platstdlib", "purelib", "platlib")


def classes_of(module: nn.Module) -> list[type]:
    """The classes of a module and its parts that no framework defines."""
    kinds = {kind: None for each in module.modules() for kind in type(each).__mro__}
    return [kind for kind in kinds if not is_of_framework(kind.__module__)]


def files_of(module: nn.Module) -> list[ModuleType]:
    """The files of those classes, and the user's own files that these import."""
    names = dict.fromkeys(kind.__module__ for kind in classes_of(module))
    found = {name: sys.modules[name] for name in names if name in sys.modules}
    waiting: list[Any] = [*classes_of(module), *found.values()]
    while waiting:
        for value in list(vars(waiting.pop()).values()):
            file = value if isinstance(value, ModuleType) else _file_of(value)
            if file is None or file.__name__ in found or not _is_own(file):
                continue
            found[file.__name__] = file
            waiting.append(file)
    return list(found.values())


def is_of_framework(name: str) -> bool:
    """Whether a module of this name belongs to a framework, and not to the user."""
    return name.split(".")[0] in FRAMEWORKS


def _file_of(value: Any) -> ModuleType | None:
    # Of other objects nothing is asked: they may import what they are asked for.
    if not isinstance(value, type | FunctionType):
        return None
    name = value.__module__
    return sys.modules.get(name) if isinstance(name, str) else None


def _is_own(file: ModuleType) -> bool:
    """Whether it is neither a framework nor installed."""
    if is_of_framework(file.__name__):
        return False
    path = vars(file).get("__file__")
    return path is not None and not path.startswith(_installed())


@functools.cache
def _installed() -> tuple[str, ...]:
    return tuple(
        str(Path(place)) for name in PLACES if (place := sysconfig.get_path(name))
    )
