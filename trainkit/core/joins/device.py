"""A window as one graph over all micro-batches, which meet at each BatchNorm layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import (
    GradientEdge,
    get_gradient_edge,
    saved_tensors_hooks,
)

from trainkit.core._compat import without_gradient_hooks
from trainkit.core.inside.moment import Moment
from trainkit.core.joins.branches import Branches, current
from trainkit.core.joins.intercepted import Intercepted
from trainkit.core.joins.joint_graph import Beginning, meet, normalised
from trainkit.core.joins.layers import Moves
from trainkit.core.joins.net import Gradients, Net
from trainkit.core.joins.transport import Kept, OnDevice
from trainkit.core.nested import Build, take_apart

AHEAD = 3
"""So many saved tensors are fetched before the backward pass needs them: a
convolution's input, its weight, which is there, and what an activation saved."""


@dataclass(eq=False)
class _Waits:
    """A tensor that the transport has."""

    kept: Kept


class DevicePass:
    """One call of a module by all micro-batches of a window, in one graph.

    Args:
        net: which is called.
        moment: what the module is like.

    Attributes:
        given: the gradients of the leaves of each micro-batch's output.
    """

    def __init__(self, net: Net, moment: Moment) -> None:
        self._net, self._moment, self._moves = net, moment, Moves(net.layers)
        self._leaves: list[list[Any]] = []
        self._waiting: list[list[Any]] = []
        self._edges: list[list[GradientEdge | None]] = []
        self.given: list[list[Tensor | None]] = []
        self.build: Build = next
        self.differentiable: list[bool] = []

    def forward(
        self,
        arguments: Sequence[list[Any]],
        look: Callable[[list[Tensor]], None] = lambda outputs: None,
    ) -> None:
        """Run the module on the arguments of each micro-batch.

        Args:
            arguments: of each.
            look: is called with the leaves of all outputs that have a graph.
        """
        has_graph = torch.is_grad_enabled()
        self._leaves = [[_leaf(value) for value in each] for each in arguments]
        if has_graph and torch.is_autocast_cache_enabled():
            torch.clear_autocast_cache()
        runs = [partial(self._run, n, each) for n, each in enumerate(self._leaves)]
        with self._on_host():
            branches = Branches(runs, self._net.switched, self)
            outputs = [take_apart(each) for each in branches]
        self.build = outputs[0][1]
        values = [[field.value for field in fields] for fields, _ in outputs]
        self.differentiable = [
            any(map(_has_graph, x)) for x in zip(*values, strict=True)
        ]
        look([x for each in values for x in each if _has_graph(x)])
        self._edges = [
            [get_gradient_edge(x) if _has_graph(x) else None for x in each]
            for each in values
        ]
        self._moves.make()
        self._waiting = [list(map(self._put, each)) for each in values]
        self.given = [[None] * len(each) for each in values]

    @property
    def trained(self) -> list[Tensor]:
        """The arguments from which the graph begins."""
        return [x for each in self._leaves for x in each if _has_graph(x)]

    def _run(self, index: int, values: list[Any]) -> Any:
        with self._net.around(index):
            return self._net.run(list(map(_may_be_changed, values)))

    def leaves(self, index: int) -> list[Any]:
        """The leaves of a micro-batch's output, which have no graph; to be had once."""
        found, self._waiting[index] = self._waiting[index], []
        if index + 1 < len(self._waiting):
            following = self._waiting[index + 1]
            self._net.transport.fetch(x.kept for x in following if _waits(x))
        return [self._net.transport.get(x.kept) if _waits(x) else x for x in found]

    def _put(self, value: Any) -> Any:
        """A leaf of an output, which waits until its step resumes."""
        if not isinstance(value, Tensor):
            return value
        return _Waits(self._net.transport.put(value.detach()))

    def give(self, index: int, gradients: Sequence[Tensor | None]) -> None:
        """Add to the gradients of the leaves of a micro-batch's output."""
        for place, gradient in enumerate(gradients):
            if gradient is not None:
                before = self.given[index][place]
                both = gradient if before is None else before + gradient
                self.given[index][place] = both

    def called(self, module: Intercepted, args: Any, kwargs: Any) -> Any:
        """A micro-batch calls a module on its way."""
        if not module.normalises:
            return module.original(*args, **kwargs)
        (x,) = [*args, *kwargs.values()]
        layer: Any = module.module
        layer._check_input_dim(x)
        branches = current()
        assert branches is not None
        join = partial(self._meet, module)
        return normalised(layer, x, *branches.meet(layer, module.name, x, join))

    def _meet(self, module: Intercepted, brought: list[Any]) -> list[Any]:
        layer: Any = module.module
        ranks = self._net.sharing.of(layer)
        statistics, found = meet(
            layer, module.name, brought, ranks, self._net.transport, runs_once=True
        )
        self._moves.add(layer, statistics)
        return found

    def _on_host(self) -> AbstractContextManager[Any]:
        """Saved tensors wait on the host, where the device has one."""
        transport = self._net.transport
        if isinstance(transport, OnDevice):
            return nullcontext()
        saved: list[Callable[[], Any]] = []

        def pack(tensor: Tensor) -> Any:
            kept = _Waits(transport.put(tensor.detach()))
            saved.append(ref(kept))
            return len(saved) - 1, kept

        def unpack(packed: Any) -> Tensor:
            number, kept = packed
            tensor = transport.get(kept.kept)
            # The backward pass goes the other way round.
            before = [each() for each in saved[max(number - AHEAD, 0) : number]]
            transport.fetch(x.kept for x in reversed(before) if x is not None)
            return tensor

        return saved_tensors_hooks(pack, unpack)

    def backward(self) -> Gradients:
        """The gradients of all that trains, by those that were given."""
        self._moment.check_weights(with_buffers=False)
        outputs, given = [], []
        for own, found in zip(self._edges, self.given, strict=True):
            for edge, gradient in zip(own, found, strict=True):
                if gradient is not None and edge is not None:
                    outputs.append(edge)
                    given.append(gradient)
        self._waiting, self._edges, self.given = [], [], []
        parameters = self._moment.parameters
        trained = self.trained
        if not outputs:
            found = iter([None] * (len(parameters) + len(trained)))
        else:
            with without_gradient_hooks(p for p in parameters if p._backward_hooks):
                found = iter(
                    torch.autograd.grad(
                        outputs, [*parameters, *trained], given, allow_unused=True
                    )
                )
        own = [next(found) for _ in parameters]
        return Gradients(
            own,
            [
                [next(found) if _has_graph(value) else None for value in each]
                for each in self._leaves
            ],
        )


def _leaf(value: Any) -> Any:
    """An argument from which the graph begins."""
    if isinstance(value, Tensor) and value.requires_grad:
        return value.detach().requires_grad_()
    return value


def _may_be_changed(value: Any) -> Any:
    """An argument that forward may change in place."""
    return Beginning.apply(value) if _has_graph(value) else value


def _has_graph(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _waits(value: Any) -> bool:
    return isinstance(value, _Waits)
