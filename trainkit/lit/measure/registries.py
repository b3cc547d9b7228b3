"""What modules, optimizers, classes and files hold, put back after a pass."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from trainkit.lit.measure.own_code import classes_of, files_of
from trainkit.lit.rerun.generators import generator_keeper
from trainkit.lit.rerun.snapshot import CONTAINERS, FRAMEWORK, VALUES, container_keeper


class Registries:
    """The parts, buffers and hooks of modules, the options of optimizers, and numbers,
    generators and containers that stand in classes and files of the user's own.

    A first pass may register what later ones use: a buffer, or hooks that collect
    outputs. Without this the training would find them registered, or twice.

    Args:
        module: whose parts and hooks.
        optimizers: whose rates and other options.
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
        self._owners = owners = [*classes_of(module), *files_of(module)]
        self._names = [frozenset(vars(owner)) for owner in owners]
        self._plain = [
            (owner, name, value)
            for owner in owners
            for name, value in vars(owner).items()
            if type(value) in VALUES
        ]
        held = [value for owner in owners for value in list(vars(owner).values())]
        self._others = [k for k in map(generator_keeper, held) if k is not None]
        self._others += [
            container_keeper(value)[0]
            for value in held
            if type(value) in CONTAINERS and value is not sys.modules
        ]

    def put_back(self) -> None:
        for value, kept in self._kept:
            if list(value) != list(kept):
                value.clear()
            value.update(kept)
        for group, kept in self._groups:
            group.update(kept)
        for owner, name, value in self._plain:
            if vars(owner).get(name) is not value:
                setattr(owner, name, value)
        for put_back in self._others:
            put_back()
        for owner, names in zip(self._owners, self._names, strict=True):
            for name in vars(owner).keys() - names:
                if _is_plain(vars(owner)[name]):  # a module stays, which was imported
                    delattr(owner, name)


def _is_plain(value: Any) -> bool:
    return type(value) in (*VALUES, *CONTAINERS) or bool(generator_keeper(value))
