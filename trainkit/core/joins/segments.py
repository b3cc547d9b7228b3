"""A segment of a forward, run for one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainkit.core.inside.moment import version_of
from trainkit.core.joins.net import Net
from trainkit.core.joins.program import Program, Untraceable
from trainkit.core.joins.statistics import Normal
from trainkit.core.joins.waiting import Waiting
from trainkit.errors import TrainkitError


@dataclass
class Graph:
    """A segment that ran with a graph, for one micro-batch.

    Attributes:
        leaves: of its inputs that train, by their names.
        normals: with copies of weights and biases of their own.
        outputs: by their names.
    """

    leaves: dict[str, Tensor]
    normals: list[Normal]
    outputs: dict[str, Any]


class Segments:
    """Runs the segments of a program, each for one micro-batch.

    Args:
        net: which is called.
        program: its forward in segments.

    Attributes:
        normals: normalise in place of the layers whose statistics are known.
    """

    def __init__(self, net: Net, program: Program) -> None:
        self._net, self._program = net, program
        self.normals: list[Normal] = []

    def outputs(self, number: int, waiting: Waiting) -> dict[str, Any]:
        """What a segment hands on, without a graph."""
        segment = self._program.segments[number]
        values = [self._given(number, name, waiting) for name in segment.inputs]
        versions = _versions(values)
        found = segment.graph(*values, *(self.normals[n] for n in segment.joins))
        self._note_written(number, versions, values)
        return dict(zip(segment.outputs, found, strict=True))

    def _given(self, number: int, name: str, waiting: Waiting) -> Any:
        """An input of a segment, which that may change."""
        value, may = waiting.get(name), self._program.may_write(number, name)
        return value.clone() if may and isinstance(value, Tensor) else value

    def _note_written(
        self, number: int, versions: Sequence[int], values: Sequence[Any]
    ) -> None:
        """Note which inputs a segment has changed in place."""
        program = self._program
        names = program.segments[number].inputs
        for name, one, now in zip(names, versions, _versions(values), strict=True):
            if one == now:
                continue
            if not program.may_write(number, name) and name in program.arguments:
                raise TrainkitError(
                    f"{self._net.name}: its forward changes an argument in place, "
                    f"which it did not in other windows. Give it a clone()."
                )
            if not program.may_write(number, name):
                raise Untraceable(
                    "a tensor is changed in place that was not in other windows"
                )
            if any(name in x.inputs for x in program.segments[number + 1 :]):
                raise Untraceable(
                    "a tensor that is passed on over a layer is changed in place, and "
                    "used again behind the next one"
                )
            program.written.add((number, name))

    def graph(self, number: int, waiting: Waiting) -> Graph:
        """Run a segment with a graph that begins at its inputs."""
        segment, values = self._program.segments[number], []
        leaves: dict[str, Tensor] = {}
        with torch.enable_grad():
            for name in segment.inputs:
                value = waiting.get(name)
                if name in self._program.trains and can_train(value):
                    value = leaves[name] = value.detach().requires_grad_()
                if self._program.may_write(number, name) and isinstance(value, Tensor):
                    value = value.clone()
                values.append(value)
            versions = _versions(values)
            normals = [
                replace(
                    each,
                    weight=each.weight.detach().requires_grad_(),
                    bias=each.bias.detach().requires_grad_(),
                )
                for each in (self.normals[n] for n in segment.joins)
            ]
            found = segment.graph(*values, *normals)
        self._note_written(number, versions, values)
        return Graph(leaves, normals, dict(zip(segment.outputs, found, strict=True)))


def can_train(value: Any) -> bool:
    """Whether a value may have a gradient."""
    if not isinstance(value, Tensor):
        return False
    return value.is_floating_point() or value.is_complex()


def _versions(values: Sequence[Any]) -> list[int]:
    return [version_of(x) if isinstance(x, Tensor) else 0 for x in values]
