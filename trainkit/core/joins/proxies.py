"""Values of a tracing that a forward leaves in the attributes of modules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx, nn


class BeforeTracing:
    """What stands in the attributes of some modules, to be put back.

    Args:
        modules: those that are traced.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._before = {
            (each, name): (value, value.copy() if _is_container(value) else value)
            for each in self._modules
            for name, value in vars(each).items()
        }

    def put_back(self) -> list[tuple[nn.Module, str]]:
        """Give those that hold values of a tracing what they held; return their
        names."""
        found = []
        for each in self._modules:
            for name, value in list(vars(each).items()):
                if not _has_proxy(value):
                    continue
                is_own = name in ("_buffers", "_parameters", "_modules")
                names = [k for k, x in value.items() if _has_proxy(x)] if is_own else []
                found += [(each, str(key)) for key in names or [name]]
                self._restore(each, name)
        return found

    def _restore(self, module: nn.Module, name: str) -> None:
        if (module, name) not in self._before:
            del vars(module)[name]
            return
        value, content = self._before[module, name]
        if isinstance(value, dict):
            value.clear()
            value.update(content)
        elif isinstance(value, list):
            value[:] = content
        vars(module)[name] = value


def _is_container(value: Any) -> bool:
    return isinstance(value, (dict, list))


def _has_proxy(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(map(_has_proxy, value))
    return isinstance(value, fx.Proxy)
