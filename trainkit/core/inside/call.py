"""One call of a module that runs in chunks of rows: its forward and backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainkit.core.generators import States
from trainkit.core.gradients import HALF
from trainkit.core.inside.cut import Node, strangers_of
from trainkit.core.inside.moment import Moment, versions_of
from trainkit.core.inside.outputs import Joined, Plan, are_close
from trainkit.core.inside.rows import Chunk
from trainkit.core.inside.tokens import refuse_padding
from trainkit.core.nested import Build, with_tensors
from trainkit.core.out_of_memory import in_smaller_parts
from trainkit.errors import TrainkitError

SAVED = object()
"""Stands for a tensor that autograd holds."""

Graph = tuple[list[Any], dict[int, Tensor]]
"""What a chunk gives that ran with a graph, and the arguments that train, by place."""


class Call:
    """One call of a module, cut into chunks of rows.

    Args:
        moment: the call, and what the module was like.
        plan: how outputs are joined.
        is_checked: whether its two passes are compared.

    Attributes:
        name: of the module, for messages.
        build: makes the output of its leaves.
        saved: the tensors among the arguments, until autograd holds them.
        differentiable: which tensors of the output have a gradient.
        chunks: in which its rows have run.
    """

    def __init__(self, moment: Moment, plan: Plan, *, is_checked: bool = False) -> None:
        self._moment, self._plan, self._is_checked = moment, plan, is_checked
        self._cut, self._arguments = moment.cut, moment.arguments
        self._devices = moment.arguments.devices
        self.name, self._values = moment.name, list[Any](moment.arguments.values)
        moment.arguments.values = []  # they are held once
        self._trained = [
            i
            for i, each in enumerate(self._values)
            if isinstance(each, Tensor) and each.requires_grad
        ]
        self._shadows = self._cut.shadows(moment.parameters)
        self.build: Build | None = None
        self.saved: Sequence[Tensor] = ()
        self._has_gradient: list[bool] = []  # by the leaves of the output
        self._tensors: list[int] = []  # the places of those that are tensors
        self.chunks: list[Chunk] = []
        self._kept: Graph | None = None
        self._first: list[Any] | None = None

    @property
    def differentiable(self) -> list[bool]:
        return [self._has_gradient[i] for i in self._tensors]

    # ---- forward ---------------------------------------------------------------------

    def leaves(self) -> list[Any]:
        """Run all chunks; the leaves of the output. With gradients on, the last chunk
        keeps its graph, which shows what of the output has a gradient."""
        values, has_graph = self._values, torch.is_grad_enabled()
        versions = versions_of(values)
        run = partial(self._run, values, has_graph=has_graph)
        with torch.no_grad():
            joined = in_smaller_parts(run, self._halves, States(self._devices).put_back)
        self._moment.check_state()
        if versions != versions_of(values):
            raise TrainkitError(
                f"{self.name}: its forward pass must not change its arguments in "
                f"place, since it runs once more in the backward pass. Give it a "
                f"clone(), or name a module within it."
            )
        leaves = joined.values
        trained = [*self._moment.parameters, *[values[i] for i in self._trained]]
        if not (has_graph and trained):
            return leaves
        self._tensors = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        self.saved = [x for x in values if isinstance(x, Tensor)]
        self._values = [SAVED if isinstance(x, Tensor) else x for x in values]
        outputs: Any = Node.apply(self, [leaves[i] for i in self._tensors], *trained)
        for place, output in zip(self._tensors, outputs, strict=True):
            leaves[place] = output
        return leaves

    def _run(self, values: list[Any], *, has_graph: bool) -> Joined:
        arguments = self._arguments
        joined = Joined(self._plan, arguments, self.name)
        self.chunks = arguments.chunks(self._moment.sizes)
        self._kept = self._first = None
        self._has_gradient = [False] * len(self._plan)
        for number, chunk in enumerate(self.chunks):
            chunk.states = States(self._devices)
            if has_graph and chunk is self.chunks[-1]:
                outputs = self._with_graph(chunk, values)
            else:
                outputs = self._outputs(chunk, arguments.of(chunk, values))
                if self._is_checked and not number:
                    self._first = with_tensors(outputs, lambda x: x.detach().clone())
            joined.add(chunk, outputs)
        self._ended = States(self._devices)
        return joined

    def _with_graph(self, chunk: Chunk, values: list[Any]) -> list[Any]:
        if torch.is_autocast_cache_enabled():
            # It holds casted weights, without a graph if they were made without.
            torch.clear_autocast_cache()
        with self._shadows.in_place():
            self._kept = outputs, leaves = self._graph(chunk, values)
        strangers_of(outputs, [*self._shadows.own, *leaves.values()], self.name)
        self._has_gradient = [
            isinstance(each, Tensor) and each.requires_grad for each in outputs
        ]
        return outputs

    def _halves(self) -> bool:
        return self._moment.sizes.halve(self._arguments.rows)

    def _outputs(self, chunk: Chunk, given: list[Any]) -> list[Any]:
        _, outputs, build = self._cut.run(self._arguments, given, self, chunk)
        self.build = self.build or build  # it holds outputs: the first have no graph
        return outputs

    def _graph(self, chunk: Chunk, values: Sequence[Any]) -> Graph:
        """Run a chunk with a graph that begins at its own arguments."""
        given, leaves = self._arguments.of(chunk, values), {}
        for index in self._trained:
            leaves[index] = given[index] = given[index].detach().requires_grad_()
        with torch.enable_grad():
            return self._outputs(chunk, given), leaves

    # ---- backward --------------------------------------------------------------------

    def backward(
        self, saved: Sequence[Tensor], given: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """One gradient for each parameter that trains, then for each argument.

        Args:
            saved: the tensors among the arguments.
            given: the gradients of the tensors of the output.
        """
        self._moment.check_weights()
        tensors, now = iter(saved), States(self._devices)
        values: list[Any] = [
            next(tensors) if each is SAVED else each for each in self._values
        ]
        gradients: list[Tensor | None] = [None] * len(self._plan)
        for place, gradient in zip(self._tensors, given, strict=True):
            gradients[place] = gradient
        if self._arguments.by_length is not None:
            refuse_padding(gradients, self._plan, self.chunks, self.name)
        shadows = self._shadows

        def begin_again() -> None:
            shadows.clear()
            now.put_back()

        run = partial(self._pass, values, gradients)
        try:
            with self._moment.again(), shadows.in_place():
                found = in_smaller_parts(run, self._may_begin_again, begin_again)
                of_parameters = shadows.gradients()
        except BaseException:
            now.put_back()
            raise
        finally:
            shadows.clear()
        of_arguments = [
            found[i].to(values[i].dtype) if i in found else None for i in self._trained
        ]
        return [*of_parameters, *of_arguments]

    def _pass(
        self, values: Sequence[Any], gradients: Sequence[Tensor | None]
    ) -> dict[int, Tensor]:
        """Run the backward pass of all chunks; the gradients of arguments.

        What the backward pass draws is another draw for each chunk, and not that of the
        forward pass.
        """
        found: dict[int, Tensor] = {}
        draws = not self.chunks[0].states.are(self._ended)
        for chunk in reversed(self.chunks):  # the last comes first: it is kept
            graph, self._kept = self._kept, None  # before memory may run out
            now = States(self._devices) if draws else None
            if graph is None:
                if draws:
                    chunk.states.put_back()
                graph = self._again(chunk, values)
            if now is not None:
                now.put_back()
            self._pull(chunk, graph[0], gradients)
            self._add(found, chunk, graph[1], values)
            del graph  # not beside the next one
        return found

    def _again(self, chunk: Chunk, values: Sequence[Any]) -> Graph:
        graph = self._graph(chunk, values)
        if self._first is None or chunk.start:
            return graph
        before, self._first = self._first, None
        for one, other in zip(before, graph[0], strict=True):
            if isinstance(one, Tensor) and not are_close(one, other):
                raise TrainkitError(
                    f"{self.name}: a chunk of rows gives other outputs when it runs "
                    f"again in the backward pass. Its forward must not change anything "
                    f"that it depends on, and must not draw from a generator of its "
                    f"own. Name a module within it that does not."
                )
        return graph

    def _may_begin_again(self) -> bool:
        """Whether the rows can run in smaller chunks. Those that drew would draw
        otherwise than in the forward pass."""
        states = self.chunks[0].states
        if not states.are(self._ended) or not self._halves():
            return False
        self._first = None
        self.chunks = self._arguments.chunks(self._moment.sizes)
        for chunk in self.chunks:
            chunk.states = states
        return True

    def _pull(
        self, chunk: Chunk, found: list[Any], gradients: Sequence[Tensor | None]
    ) -> None:
        """Run the backward pass of a chunk."""
        outputs, given = [], []
        for output, joint, gradient, is_expected in zip(
            found, self._plan, gradients, self._has_gradient, strict=True
        ):
            if not (isinstance(output, Tensor) and output.requires_grad):
                continue
            if not is_expected:
                raise TrainkitError(
                    f"{self.name}: {joint.name} has a gradient in some chunks of rows "
                    f"and none in others. Name a module within it, or around it."
                )
            if joint.dim is not None and gradient is not None:
                gradient = joint.part(gradient, chunk)
            elif chunk.stop < self._arguments.rows:
                continue  # a value that all chunks share is the last one's
            if gradient is not None:
                outputs.append(output)
                given.append(gradient)
        if outputs:
            torch.autograd.backward(outputs, given)

    def _add(
        self,
        found: dict[int, Tensor],
        chunk: Chunk,
        leaves: dict[int, Tensor],
        values: Sequence[Any],
    ) -> None:
        """Add the gradients of a chunk's arguments to those of the call: its rows, or
        its share."""
        for index, leaf in leaves.items():
            if leaf.grad is None:
                continue
            value, is_cut = values[index], self._arguments.cut[index]
            if index not in found:
                wide = value.dtype in HALF and not is_cut
                dtype = torch.float32 if wide else value.dtype
                found[index] = torch.zeros_like(value, dtype=dtype)
            self._arguments.part(found[index], index, chunk).add_(leaf.grad)
