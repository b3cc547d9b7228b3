"""One call of a module that runs in chunks of rows: its forward and backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from trainkit.core.inside.checks import Check
from trainkit.core.inside.chunks import Chunk, Sizes, are_same
from trainkit.core.inside.draws import Draws, torch_states
from trainkit.core.inside.joined import Joined
from trainkit.core.inside.keep import Keeper
from trainkit.core.inside.moment import Moment, replaced_parameters
from trainkit.core.inside.rows import Plan, output_name
from trainkit.core.inside.sums import Pieces, Sums
from trainkit.core.out_of_memory import is_out_of_memory, release
from trainkit.core.split.fields import Build, take_apart
from trainkit.errors import TrainkitError


@dataclass(frozen=True)
class Cut:
    """A module that is cut, as each of its calls knows it.

    Attributes:
        module: whose forward runs in chunks.
        run: that forward, on a list of arguments.
        name: of the module, for messages.
        sizes: how large a chunk may be.
        draws: keeps random states.
        check: of the first calls.
        keeper: measures the graph of a chunk.
    """

    module: nn.Module
    run: Callable[[list[Any]], Any]
    name: str
    sizes: Sizes
    draws: Draws
    check: Check
    keeper: Keeper


@dataclass
class Graph:
    """A chunk that ran with a graph: where its gradients go to, and come from."""

    sources: list[Tensor]
    outputs: list[Any]


class Call:
    """One call of a module, cut into chunks of rows.

    Args:
        cut: what is called.
        plan: which arguments have rows, and how outputs are joined.
        values: the arguments.
        num_rows: how many rows they have.
        num_kept: how many chunks keep their graph until the backward pass.

    Attributes:
        values: None once autograd holds them.
        moment: what the module was like.
        trained: the indices of the arguments that get a gradient.
        build: makes the output of its leaves.
        differentiable: which leaves of the output have a gradient.
        leaves: of the output, as made in the forward pass.
    """

    def __init__(
        self, cut: Cut, plan: Plan, values: list[Any], num_rows: int, num_kept: int
    ) -> None:
        self._cut, self._plan, self._num_rows = cut, plan, num_rows
        self._num_kept = num_kept
        self.values: list[Any] | None = values
        tensors = {i: v for i, v in enumerate(values) if isinstance(v, Tensor)}
        self._devices = {each.device for each in tensors.values()}
        self.moment = Moment(cut.module, cut.name, self._devices)
        self.trained = [i for i, each in tensors.items() if each.requires_grad]
        self.build: Build | None = None
        self.differentiable: list[bool] = []
        self._done: list[Chunk] = []
        self._kept: dict[Chunk, Graph] = {}
        self._states: list[Tensor] = []
        self.leaves: list[Any] = []

    @property
    def trains(self) -> bool:
        """Whether a parameter or an argument gets a gradient."""
        return bool(self.trained or self.moment.parameters)

    # ---- forward ---------------------------------------------------------------------

    def forward(self, *, has_graph: bool) -> list[Any]:
        """Run all chunks, and join the leaves of their outputs.

        Args:
            has_graph: whether the last chunks run with a graph, which shows what of the
                output has a gradient.
        """
        assert self.values is not None
        joined = Joined(self._plan, self._num_rows, self._cut.name)
        waiting = self._cut.sizes.cut(0, self._num_rows)
        num_kept = max(self._num_kept, 1) if has_graph else 0
        with torch.no_grad():
            while len(waiting) > num_kept:
                self._forward(waiting, joined, has_graph=False)
        if has_graph and torch.is_autocast_cache_enabled():
            # It holds casted weights, which have no graph if they were made without.
            torch.clear_autocast_cache()
        while waiting:
            self._forward(waiting, joined, has_graph=has_graph)
        self._states = torch_states(self._devices)
        self.moment.check_state()
        return joined.values

    def _forward(
        self, waiting: list[Chunk], joined: Joined, *, has_graph: bool
    ) -> None:
        """Run the first chunk that waits. Where memory runs out, cut all finer."""
        cut, values, chunk = self._cut, self.values, waiting[0]
        assert values is not None
        chunk.states = torch_states(self._devices)
        chunk.put_back = cut.draws.keep(self._devices, chunk.states)
        try:
            if has_graph:
                graph = self._graph(chunk, values)
                outputs = graph.outputs
            else:
                graph, outputs = None, self._outputs(self._taken(chunk, values))
        except Exception as error:
            is_memory = cut.sizes.is_auto and is_out_of_memory(error)
            if not is_memory or chunk.num_rows == 1:
                raise
            release(error)
            cut.sizes.failed(chunk.num_rows)
            chunk.put_back()
            waiting[:] = cut.sizes.cut(chunk.start, self._num_rows)
            return
        joined.add(chunk, outputs)
        self._done.append(waiting.pop(0))
        if graph is None:
            cut.check.ran(chunk, outputs)
            return
        have = map(_has_gradient, outputs)
        before = self.differentiable or [False] * len(outputs)
        self.differentiable = [a or b for a, b in zip(before, have, strict=True)]
        if self._num_kept:
            self._kept[chunk] = graph
        else:
            cut.check.ran(chunk, outputs)

    def _taken(self, chunk: Chunk, values: Sequence[Any]) -> list[Any]:
        pairs = zip(values, self._plan.multiples, strict=True)
        return [chunk.part(each, 0, m) if m else each for each, m in pairs]

    def _outputs(self, arguments: list[Any]) -> list[Any]:
        fields, build = take_apart(self._cut.run(arguments))
        self.build = self.build or build  # it holds outputs: the first have no graph
        return [field.value for field in fields]

    def _graph(self, chunk: Chunk, values: Sequence[Any]) -> Graph:
        """Run a chunk with a graph that begins at its own arguments."""
        arguments = self._taken(chunk, values)
        for index in self.trained:
            arguments[index] = arguments[index].detach().requires_grad_()
        parameters, cut = self.moment.parameters, self._cut
        with ExitStack() as stack:
            if self.moment.has_hooks:
                # Hooks on a gradient are for the sum, not for each chunk's share.
                shadows = [each.detach().requires_grad_() for each in parameters]
                others = list(zip(parameters, shadows, strict=True))
                stack.enter_context(replaced_parameters(cut.module, others))
                parameters = shadows
            stack.enter_context(torch.enable_grad())
            stack.enter_context(cut.keeper.weighed(parameters))
            outputs = self._outputs(arguments)
        sources = [*parameters, *(arguments[index] for index in self.trained)]
        return Graph(sources, outputs)

    # ---- backward --------------------------------------------------------------------

    def backward(
        self, values: Sequence[Any], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """One gradient for each parameter that trains, then for each argument.

        Args:
            values: the arguments.
            gradients: of the leaves of the output.
        """
        if torch.is_grad_enabled():
            raise TrainkitError(
                f"{self._cut.name}: it runs in chunks, so that its gradient has no "
                f"gradient of its own, which create_graph=True asks for. Name another "
                f"module to cut, or leave out the gradient penalty."
            )
        self.moment.check_weights()
        self._cut.keeper.passed()
        num = len(self.moment.parameters)
        sums = Sums(self.moment.parameters)
        pieces = Pieces([(values[i], self._plan.multiples[i]) for i in self.trained])
        now = self._cut.draws.keep(self._devices)
        kept, self._kept = self._kept, {}
        # Kept graphs come first, since they make room.
        waiting = [*kept, *(each for each in self._done if each not in kept)]
        try:
            with self.moment.again():
                while waiting:
                    graph = kept.pop(waiting[0], None)
                    found = self._backward(waiting, graph, values, gradients)
                    if found is not None:
                        sums.add(found[:num])
                        pieces.add(waiting.pop(0), found[num:])
                        del found  # not beside the next chunk's graph
        finally:
            now()
        self._cut.check.passed()
        return [*sums.results(), *pieces.results()]

    def _backward(
        self,
        waiting: list[Chunk],
        graph: Graph | None,
        values: Sequence[Any],
        gradients: Sequence[Tensor | None],
    ) -> Sequence[Tensor | None] | None:
        """The gradients of the first chunk that waits; None if it was cut finer."""
        chunk = waiting[0]
        try:
            if graph is None:
                chunk.put_back()
                with save_on_cpu() if chunk.is_on_host else nullcontext():
                    graph = self._graph(chunk, values)
                self._cut.check.ran_again(chunk, graph.outputs, self._cut.name)
            return self._pulled(chunk, graph, gradients)
        except Exception as error:
            sizes = self._cut.sizes
            if not sizes.is_auto or not is_out_of_memory(error) or chunk.is_on_host:
                raise
            graph = None
            release(error)
            if chunk.num_rows > 1:
                sizes.failed(chunk.num_rows)
            if chunk.num_rows == 1 or self._has_drawn(chunk):
                chunk.is_on_host = True  # halves would draw otherwise
                return None
            halves = sizes.cut(chunk.start, chunk.stop)
            for half in halves:
                half.put_back, half.states = chunk.put_back, chunk.states
            waiting[:1] = halves
            at = self._done.index(chunk)
            self._done[at : at + 1] = halves
            return None

    def _has_drawn(self, chunk: Chunk) -> bool:
        """Whether a chunk drew random numbers in its forward pass."""
        draws, following = self._cut.draws, self._done.index(chunk) + 1
        is_last = following == len(self._done)
        after = self._states if is_last else self._done[following].states
        return draws.of_host or bool(draws.own) or not are_same(chunk.states, after)

    def _pulled(
        self, chunk: Chunk, graph: Graph, gradients: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """The gradients of a chunk's sources."""
        outputs, given = [], []
        for index, output in enumerate(graph.outputs):
            gradient, joint = gradients[index], self._plan.joints[index]
            if not _has_gradient(output):
                continue
            if not self.differentiable[index]:
                raise TrainkitError(
                    f"{self._cut.name}: {output_name(self._plan.paths[index])} has a "
                    f"gradient in some chunks of rows and none in others. Name a "
                    f"module within it, or around it."
                )
            if joint.dim is not None and gradient is not None:
                gradient = chunk.part(gradient, joint.dim, joint.multiple)
            elif chunk.stop != self._num_rows:
                continue  # a value that all chunks share is the last one's
            if gradient is not None:
                outputs.append(output)
                given.append(gradient)
        if not outputs:
            return [None] * len(graph.sources)
        return torch.autograd.grad(outputs, graph.sources, given, allow_unused=True)


class Run(torch.autograd.Function):
    """A call as autograd sees it: one node, whose inputs are all that trains."""

    @staticmethod
    def forward(ctx: Any, call: Call, *trained: Tensor) -> tuple[Tensor, ...]:
        assert call.values is not None
        leaves = call.forward(has_graph=True)
        # Saved, they raise as usual if they are changed before the backward pass.
        ctx.at = [i for i, v in enumerate(call.values) if isinstance(v, Tensor)]
        ctx.save_for_backward(*(call.values[i] for i in ctx.at))
        ctx.others = [None if isinstance(v, Tensor) else v for v in call.values]
        ctx.call, call.values = call, None
        ctx.set_materialize_grads(False)
        call.leaves = leaves
        tensors = {i: v for i, v in enumerate(leaves) if isinstance(v, Tensor)}
        ctx.outputs = list(tensors)
        plain = [v for i, v in tensors.items() if not call.differentiable[i]]
        ctx.mark_non_differentiable(*plain)
        return tuple(tensors.values())

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        values = list(ctx.others)
        for place, value in zip(ctx.at, ctx.saved_tensors, strict=True):
            values[place] = value
        gradients: list[Tensor | None] = [None] * len(ctx.call.differentiable)
        for place, gradient in zip(ctx.outputs, given, strict=True):
            gradients[place] = gradient
        return (None, *ctx.call.backward(values, gradients))


def run_in_chunks(call: Call) -> Any:
    """The output of a call, whose rows run in chunks."""
    assert call.values is not None
    if not (torch.is_grad_enabled() and call.trains):
        leaves = call.forward(has_graph=False)
    else:
        trained = (call.values[index] for index in call.trained)
        outputs = iter(Run.apply(call, *call.moment.parameters, *trained))  # type: ignore[arg-type]
        leaves = [next(outputs) if isinstance(v, Tensor) else v for v in call.leaves]
        call.leaves = []
    assert call.build is not None
    return call.build(iter(leaves))


def _has_gradient(output: Any) -> bool:
    return isinstance(output, Tensor) and output.requires_grad
