"""A module whose BatchNorm layers see a whole window, as one call of it knows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from trainkit.core.joins.layers import Sharing, normalises_by_batch
from trainkit.core.joins.transport import OnDevice, Transport
from trainkit.core.nested import Build

Around = Callable[[int], AbstractContextManager[Any]]


def nothing_around(index: int) -> AbstractContextManager[Any]:
    """No context for a micro-batch."""
    return nullcontext()


@dataclass(frozen=True)
class Net:
    """A module that runs in micro-batches which share statistics.

    Attributes:
        module: whose forward runs.
        name: of the module, for messages.
        run: its own forward, on a list of arguments.
        layers: its layers that normalise by the window, with their names.
        sharing: which ranks share their statistics.
        transport: keeps what the backward pass needs.
        around: a context for the forward of each micro-batch.
        switched: is called with the number of the micro-batch that runs next.
    """

    module: nn.Module
    name: str
    run: Callable[[list[Any]], Any]
    layers: Mapping[nn.Module, str]
    sharing: Sharing = field(default_factory=Sharing)
    transport: Transport = field(default_factory=OnDevice)
    around: Around = nothing_around
    switched: Callable[[int], None] = lambda index: None

    def path(self, module: nn.Module) -> str:
        """The name of a module within this one, for messages."""
        for name, each in self.module.named_modules():
            if each is module:
                return f"{self.name}.{name}" if name else self.name
        return self.name


def layers_of(module: nn.Module, name: str) -> dict[nn.Module, str]:
    """The layers of a module that normalise by the batch at present, by their names."""
    return {
        layer: f"{name}.{path}" if path else name
        for path, layer in module.named_modules()
        if normalises_by_batch(layer)
    }


@dataclass(frozen=True)
class Gradients:
    """What a backward pass has found.

    Attributes:
        parameters: one for each parameter that trains.
        arguments: for each micro-batch, one for each argument.
    """

    parameters: list[Tensor | None]
    arguments: list[list[Tensor | None]]


class Pass(Protocol):
    """One call of a module by all micro-batches of a window, forward and backward.

    Attributes:
        build: makes the output of its leaves.
        differentiable: which leaves of the output have a gradient.
        parameters: what trains in the module.
    """

    @property
    def build(self) -> Build: ...

    @property
    def differentiable(self) -> list[bool]: ...

    @property
    def parameters(self) -> list[Tensor]: ...

    def leaves(self, index: int) -> list[Any]:
        """The leaves of a micro-batch's output, which have no graph; to be had once."""
        ...

    def give(self, index: int, gradients: Sequence[Tensor | None]) -> None:
        """Add to the gradients of the leaves of a micro-batch's output."""

    def backward(self) -> Gradients:
        """The gradients of all that trains, by those that were given."""
        ...
