"""Tensors that a forward pass leaves in attributes, where micro-batches overwrite each
other's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from trainkit.core.inside.moment import OF_TORCH


class Left:
    """What stands in the attributes of a module, to be compared later.

    Args:
        module: and those in it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = self._tensors()

    def _tensors(self) -> dict[str, list[Tensor]]:
        return {
            f"{path}.{name}".lstrip("."): tensors
            for path, each in self._module.named_modules()
            for name, value in vars(each).items()
            if name not in OF_TORCH and (tensors := list(_tensors_in(value)))
        }

    def since(self, *, with_graph: bool = False) -> list[str]:
        """The names of the attributes that hold tensors they did not hold before.

        Args:
            with_graph: only those that have a gradient.
        """
        return [
            name
            for name, tensors in self._tensors().items()
            for before in [self._before.get(name, [])]
            if any(
                not any(one is other for other in before)
                and (one.requires_grad or not with_graph)
                for one in tensors
            )
        ]


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        yield from (each for each in value if isinstance(each, Tensor))
    elif isinstance(value, dict):
        yield from (each for each in value.values() if isinstance(each, Tensor))
