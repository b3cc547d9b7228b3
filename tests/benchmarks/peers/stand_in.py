"""Stand-ins for packages that a framework imports and this work does not use.

torchvision has no build for every build of torch: on a CPU it cannot be imported beside
a torch that came from elsewhere. Its names are then classes that do nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _Anything(type):
    """A class with a class for every name."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {"__module__": cls.__module__})


class _Nothing(ModuleType):
    """A package with a class that does nothing for every name."""

    __path__ = ()  # type: ignore[assignment]  # it counts as a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Anything(name, (), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages of these names, and all modules in them."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] not in self.packages:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Nothing(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__version__"] = "0.0"


def stand_in(*packages: str) -> None:
    """From here on, `import package` gives a stand-in."""
    sys.meta_path.insert(0, StandIns(packages))
