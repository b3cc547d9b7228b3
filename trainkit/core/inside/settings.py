"""The numbers and words in a module's attributes, on which its forward may depend."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

Settings = dict[tuple[nn.Module, str], object]

KINDS = frozenset({int, float, bool, str})
OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""The attributes that torch gives each module."""


def settings_of(module: nn.Module) -> Settings:
    """The numbers and words in attributes of a module and of those in it; the modes of
    its layers are among them."""
    return {
        (each, name): value
        for each in module.modules()
        for name, value in vars(each).items()
        if type(value) in KINDS and name not in OF_TORCH
    }


def changed(before: Settings, after: Settings) -> set[tuple[nn.Module, str]]:
    """The attributes that are other ones than before."""
    if before == after:
        return set()
    both = before.keys() & after.keys()
    return (before.keys() ^ after.keys()) | {k for k in both if before[k] != after[k]}


def put_back(settings: Settings, where: Collection[tuple[nn.Module, str]]) -> None:
    """Give attributes the values that they had."""
    for module, name in where:
        if (module, name) in settings:
            vars(module)[name] = settings[module, name]
        else:
            vars(module).pop(name, None)
