"""One call of a module that runs in chunks of rows: its forward and backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import (
    ExitStack,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

from trainkit.core._compat import without_gradient_hooks
from trainkit.core.inside.checks import Strangers
from trainkit.core.inside.chunks import Chunk
from trainkit.core.inside.cut import Cut
from trainkit.core.inside.draws import (
    are_same,
    put_back_on_host,
    states_of_host,
    torch_states,
)
from trainkit.core.inside.hints import noted
from trainkit.core.inside.joined import Joined
from trainkit.core.inside.moment import Moment, version_of
from trainkit.core.inside.rows import Plan, output_name
from trainkit.core.inside.sharded import pulled, replaced_parameters
from trainkit.core.inside.sums import Pieces, Sums
from trainkit.core.nested import Build, take_apart
from trainkit.core.out_of_memory import is_out_of_memory, release
from trainkit.errors import TrainkitError


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

    Attributes:
        num_rows: of the arguments.
        values: None once autograd holds them.
        moment: what the module was like.
        trained: the indices of the arguments that get a gradient.
        build: makes the output of its leaves.
        differentiable: which leaves of the output have a gradient.
        leaves: of the output, as made in the forward pass.
    """

    def __init__(self, cut: Cut, plan: Plan, values: list[Any], num_rows: int) -> None:
        self._cut, self._plan, self.num_rows = cut, plan, num_rows
        self.values: list[Any] | None = values
        tensors = {i: v for i, v in enumerate(values) if isinstance(v, Tensor)}
        self._devices = {each.device for each in tensors.values()}
        apart = cut.shards.own if cut.shards is not None else ()
        self.moment = Moment(cut.module, cut.name, self._devices, apart)
        self.trained = [i for i, each in tensors.items() if each.requires_grad]
        self.build: Build | None = None
        self.differentiable: list[bool] = []
        self._done: list[Chunk] = []
        self._kept: dict[Chunk, Graph] = {}
        self._states: list[Tensor] = []
        self._strangers = Strangers(cut.name)
        self.leaves: list[Any] = []
        trains = torch.is_grad_enabled() and self.trains
        rows = min(num_rows, cut.sizes.limit or num_rows)
        may_keep = trains and cut.shards is None
        self._num_kept = cut.keeper.begin(self._devices, rows) if may_keep else 0

    @property
    def trains(self) -> bool:
        """Whether a parameter or an argument gets a gradient."""
        shards = self._cut.shards
        has_more = shards is not None and shards.trains
        return bool(self.trained or self.moment.parameters or has_more)

    # ---- forward ---------------------------------------------------------------------

    def forward(self, *, has_graph: bool) -> list[Any]:
        """Run all chunks, and join the leaves of their outputs.

        Args:
            has_graph: whether the last chunks run with a graph, which shows what of the
                output has a gradient.
        """
        assert self.values is not None
        draws = self._cut.draws
        put_back, on_host = draws.keep(self._devices), states_of_host()
        versions = self._versions()
        leaves = self._chunks(has_graph=has_graph)
        self.moment.check_state()
        if versions != self._versions():
            raise TrainkitError(
                f"{self._cut.name}: its forward pass must not change its arguments in "
                f"place, since it runs once more in the backward pass. Give it a "
                f"clone(), or name a module within it."
            )
        if draws.note(on_host):
            # Its chunks did not keep the states of a generator that it now draws from.
            put_back()
            put_back_on_host(on_host)
            return self.forward(has_graph=has_graph)
        return leaves

    def _chunks(self, *, has_graph: bool) -> list[Any]:
        cut, waits = self._cut, self._cut.check.is_on
        cut.check.read(cut.name)
        joined = Joined(self._plan, self.num_rows, cut.name, cut.width, waits=waits)
        waiting = cut.sizes.cut(0, self.num_rows)
        self._done, self._kept, self.differentiable = [], {}, []
        while waiting:
            is_last = has_graph and len(waiting) <= max(self._num_kept, 1)
            if is_last and not self._kept and torch.is_autocast_cache_enabled():
                # It holds casted weights, without a graph if they were made without.
                torch.clear_autocast_cache()
            with nullcontext() if is_last else torch.no_grad():
                self._forward(waiting, joined, has_graph=is_last)
        self._states = torch_states(self._devices)
        cut.check.differs = joined.differs
        return joined.values

    def _versions(self) -> list[int]:
        return [version_of(x) for x in self.values or () if isinstance(x, Tensor)]

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
                arguments = self._taken(chunk, values)
                graph, outputs = None, self._outputs(chunk, arguments)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if cut.keeper.failed():
                self._num_kept = min(self._num_kept, 1)
            elif cut.sizes.is_auto and chunk.num_rows > 1:
                cut.sizes.failed(chunk.num_rows)
            else:
                raise
            graph = None
            release(error)
            # All again: a chunk that has drawn cannot be cut in the backward pass.
            [*self._done, chunk][0].put_back()
            self._done, self._kept = [], {}
            waiting[:] = cut.sizes.cut(0, self.num_rows)
            return
        joined.add(chunk, outputs)
        self._done.append(waiting.pop(0))
        if graph is None:
            cut.check.ran(chunk, outputs)
            return
        self._look_for_strangers(graph)
        if not self.trains and any(map(_has_gradient, outputs)):
            chunk.put_back()
            self._strangers.look(self._graph(chunk, values).outputs, ())
        have = map(_has_gradient, outputs)
        before = self.differentiable or [False] * len(outputs)
        self.differentiable = [a or b for a, b in zip(before, have, strict=True)]
        if self._num_kept:
            self._kept[chunk] = graph
        else:
            cut.check.ran(chunk, outputs)

    def _look_for_strangers(self, graph: Graph) -> None:
        if self._cut.shards is not None:
            return  # whose weights are other tensors in each pass
        self._strangers.look(graph.outputs, graph.sources)

    def _taken(self, chunk: Chunk, values: Sequence[Any]) -> list[Any]:
        plan = self._plan
        each = zip(values, plan.multiples, plan.columns, strict=True)
        return [chunk.part(v, 0, m, c) if m or c else v for v, m, c in each]

    def _outputs(self, chunk: Chunk, arguments: list[Any]) -> list[Any]:
        rows = f"rows {chunk.start} to {chunk.stop - 1} of {self.num_rows}"
        note = f"trainkit | {self._cut.name}: raised while it ran on {rows}"
        with noted(note), self._cut.around(self, chunk):
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
            if cut.shards is not None:
                shadows = [each.detach().requires_grad_() for each in parameters]
                others = list(zip(parameters, shadows, strict=True))
                stack.enter_context(replaced_parameters(cut.module, others))
                parameters = shadows
            stack.enter_context(torch.enable_grad())
            outputs = self._outputs(chunk, arguments)
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
        self._refuse_graph()
        self.moment.check_weights()
        self._cut.keeper.passed()
        num, plan = len(self.moment.parameters), self._plan
        sums, pieces = self._empty(values)
        if self._cut.padding is not None:
            self._cut.padding.look(gradients, plan, self._done, self._cut.name)
        self._now = self._cut.draws.keep(self._devices)
        kept, self._kept = self._kept, {}
        # The last comes first: its graph may be kept, and the order is always the same.
        waiting = self._done[::-1]
        try:
            with self.moment.again():
                while waiting:
                    graph = kept.pop(waiting[0], None)
                    with self._chunk_of_shards(is_last=len(waiting) == 1):
                        found = self._backward(waiting, graph, values, gradients, sums)
                    if found is None and sums.is_torn:
                        sums, pieces = self._empty(values)
                        waiting = self._done[::-1]
                    elif found is not None:
                        chunk = waiting.pop(0)
                        sums.add(found[:num], chunk.num_rows)
                        pieces.add(chunk, found[num:])
                        del found  # not beside the next chunk's graph
        finally:
            self._now()
        self._cut.check.passed()
        return [*sums.results(), *pieces.results()]

    def _refuse_graph(self) -> None:
        if torch.is_grad_enabled():
            raise TrainkitError(
                f"{self._cut.name}: it runs in chunks, so that its gradient has no "
                f"gradient of its own, which create_graph=True asks for. Name another "
                f"module to cut, or leave out the gradient penalty."
            )

    def _empty(self, values: Sequence[Any]) -> tuple[Sums, Pieces]:
        """The gradients of no chunk yet."""
        plan, at = self._plan, self.trained
        rows = [(values[i], plan.multiples[i]) for i in at]
        shares = self._cut.shares(self.num_rows)
        return Sums(self.moment.parameters, shares), Pieces(
            rows, [plan.columns[i] for i in at]
        )

    def _backward(
        self,
        waiting: list[Chunk],
        graph: Graph | None,
        values: Sequence[Any],
        gradients: Sequence[Tensor | None],
        sums: Sums,
    ) -> Sequence[Tensor | None] | None:
        """The gradients of the first chunk that waits; None if it was cut finer."""
        chunk = waiting[0]
        try:
            if graph is None:
                chunk.put_back()
                with save_on_cpu() if chunk.is_on_host else nullcontext():
                    graph = self._graph(chunk, values)
                self._cut.check.ran_again(chunk, graph.outputs, self._cut.name)
                self._look_for_strangers(graph)
            return self._pulled(chunk, graph, gradients, sums)
        except Exception as error:
            sizes = self._cut.sizes
            self._cut.keeper.failed()
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
            waiting[:1] = halves[::-1]
            at = self._done.index(chunk)
            self._done[at : at + 1] = halves
            return None

    def _chunk_of_shards(self, *, is_last: bool) -> Any:
        shards = self._cut.shards
        return nullcontext() if shards is None else shards.chunk(is_last=is_last)

    def _has_drawn(self, chunk: Chunk) -> bool:
        """Whether a chunk drew random numbers in its forward pass."""
        draws, following = self._cut.draws, self._done.index(chunk) + 1
        is_last = following == len(self._done)
        after = self._states if is_last else self._done[following].states
        return draws.of_host or bool(draws.own) or not are_same(chunk.states, after)

    def _pulled(
        self,
        chunk: Chunk,
        graph: Graph,
        gradients: Sequence[Tensor | None],
        sums: Sums,
    ) -> Sequence[Tensor | None]:
        """The gradients of a chunk's sources."""
        outputs, given = [], []
        for index, output in enumerate(graph.outputs):
            if not _has_gradient(output):
                continue
            if not self.differentiable[index]:
                raise TrainkitError(
                    f"{self._cut.name}: {output_name(self._plan.paths[index])} has a "
                    f"gradient in some chunks of rows and none in others. Name a "
                    f"module within it, or around it."
                )
            gradient = self._part(chunk, index, gradients[index])
            if gradient is not None:
                outputs.append(output)
                given.append(gradient)
        if not outputs:
            return [None] * len(graph.sources)
        if self._cut.shards is not None:
            return pulled(outputs, given, graph.sources)
        # Hooks on a gradient are for the sum, not for each chunk's share.
        hooked = [each for each in self.moment.parameters if each._backward_hooks]
        with (
            self._draws_follow(),
            without_gradient_hooks(hooked),
            sums.arriving(outputs, graph.sources),
        ):
            return torch.autograd.grad(outputs, graph.sources, given, allow_unused=True)

    def _part(self, chunk: Chunk, index: int, gradient: Tensor | None) -> Tensor | None:
        """A chunk's part of the gradient of a leaf of the output."""
        joint = self._plan.joints[index]
        if joint.dim is not None and gradient is not None:
            return chunk.part(gradient, joint.dim, joint.multiple, joint.padded)
        # A value that all chunks share is the last one's.
        return gradient if chunk.stop == self.num_rows else None

    @contextmanager
    def _draws_follow(self) -> Iterator[None]:
        """What backward passes draw follows on what the one before has drawn."""
        draws = self._cut.draws
        if draws.of_backward:
            self._now()
        yield
        if draws.of_backward:
            self._now = draws.keep(self._devices)


def _has_gradient(output: Any) -> bool:
    return isinstance(output, Tensor) and output.requires_grad
