"""What modules, optimizers, classes and files hold, put back after a pass."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from torch import nn

from trainkit.core.bare import is_a, names_in
from trainkit.lit.measure.host_draws import Unmoved
from trainkit.lit.measure.own_code import owners_of
from trainkit.lit.rerun.snapshot import FRAMEWORK, Snapshot


class Registries:
    """The parts, buffers and hooks of modules, the options of optimizers, and what
    stands in classes and files of the user's own.

    A first pass may register what later ones use: a buffer, or hooks that collect
    outputs. Without this the training would find them registered, or twice.

    Args:
        module: whose parts and hooks.
        optimizers: whose rates and other options.

    Attributes:
        values: what the values in classes and files hold.
    """

    def __init__(self, module: nn.Module, optimizers: list[Any]) -> None:
        held = (
            value
            for each in module.modules()
            for name, value in vars(each).items()
            if name in FRAMEWORK and isinstance(value, dict)
        )
        self._kept = [(value, dict(value)) for value in held]
        groups = [group for each in optimizers for group in each.param_groups]
        self._groups = [(group, dict(group)) for group in groups]
        # A double underscore marks what Python itself keeps there.
        self._owners = [(each, _own_names(each)) for each in owners_of(module)]
        pairs = [pair for _, names in self._owners for pair in names.items()]
        own = [
            p for p in pairs if p[1] is not sys.modules and type(p[1]) is not Unmoved
        ]
        names, values = zip(*own, strict=True) if own else ((), ())
        left = [module]
        self.values = Snapshot(*values, names=names, leave_out=left, by_value=False)

    def put_back(self) -> None:
        for value, kept in self._kept:
            if list(value) != list(kept):
                value.clear()
            value.update(kept)
        for group, kept in self._groups:
            group.update(kept)
        for owner, kept in self._owners:
            present = _own_names(owner)
            for name, value in kept.items():
                if present.get(name, kept) is not value:
                    _bare(owner).__setattr__(owner, name, value)
            for name in present.keys() - kept.keys():
                if not is_a(present[name], ModuleType):  # which was imported
                    _bare(owner).__delattr__(owner, name)
        self.values.restore()


def _own_names(owner: Any) -> dict[str, Any]:
    return {n: v for n, v in names_in(owner).items() if not n.startswith("__")}


def _bare(owner: Any) -> Any:
    """Whose methods set what a class or a file holds, without code of its own."""
    return type if is_a(owner, type) else ModuleType
