"""What modules and optimizers have registered, put back after a pass."""

from __future__ import annotations

from typing import Any

from torch import nn

from trainkit.lit.rerun.snapshot import FRAMEWORK


class Registries:
    """The parts, buffers and hooks of modules, and the options of optimizers.

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

    def put_back(self) -> None:
        for value, kept in self._kept:
            if list(value) != list(kept):
                value.clear()
            value.update(kept)
        for group, kept in self._groups:
            group.update(kept)
