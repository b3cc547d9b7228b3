"""What is checked in the first calls of a module in chunks, and seldom after them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.core.gradients import leaves_of
from trainkit.core.inside.chunks import Chunk
from trainkit.core.inside.rows import ROUNDING, are_close
from trainkit.core.split.fields import take_apart
from trainkit.errors import TrainkitError

ON_DEVICE = 200
"""On a device, sums in another order may be off by so many times more."""


class Check:
    """Compares a chunk's outputs in both passes: in backward passes 1, 2, 4, 8, ..."""

    def __init__(self) -> None:
        self._num_passes = 0
        self._first: tuple[Chunk, list[Any]] | None = None

    def ran(self, chunk: Chunk, outputs: Sequence[Any]) -> None:
        """A chunk has run in a forward pass, whose graph is not kept."""
        number = self._num_passes + 1
        if self._first is None and number & (number - 1) == 0:
            copies = [
                x.detach().clone() if isinstance(x, Tensor) else x for x in outputs
            ]
            self._first = chunk, copies

    def ran_again(self, chunk: Chunk, outputs: Sequence[Any], name: str) -> None:
        """A chunk has run again, in the backward pass."""
        if self._first is None or self._first[0] is not chunk:
            return
        before, self._first = self._first[1], None
        for one, other in zip(before, outputs, strict=True):
            if not isinstance(one, Tensor):
                continue
            rounding = ROUNDING * (ON_DEVICE if one.device.type != "cpu" else 1)
            if not are_close(one, other, rounding=rounding):
                raise TrainkitError(
                    f"{name}: a chunk of rows gives other outputs when it runs again "
                    f"in the backward pass. Its forward must not change anything that "
                    f"it depends on, and must not draw from a generator that is hidden "
                    f"from torch. Name a module within it that does not."
                )

    def passed(self) -> None:
        """A backward pass is over."""
        self._num_passes += 1
        self._first = None


def foreign_leaves(run: Callable[[], Any], known: Sequence[Tensor]) -> list[Tensor]:
    """What a module trains that is neither a parameter of it nor an argument.

    A leaf that is made anew in each run is no such thing.

    Args:
        run: runs the module on a few rows.
        known: its parameters and arguments.
    """
    ids = {id(each) for each in known}
    with torch.enable_grad():
        runs = [_leaves(run()), _leaves(run())]
    again = {id(each) for each in runs[1]}
    return [each for each in runs[0] if id(each) in again - ids]


def _leaves(output: Any) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for field in take_apart(output)[0]:
        if isinstance(field.value, Tensor) and field.value.requires_grad:
            found |= {id(leaf): leaf for leaf in leaves_of(field.value)}
    return list(found.values())
