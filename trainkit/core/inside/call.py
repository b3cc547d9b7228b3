"""One call of a module that runs in chunks of rows: its forward and backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.core.gradients import HALF
from trainkit.core.inside.chunks import Chunk
from trainkit.core.inside.closeness import are_close
from trainkit.core.inside.cut import Cut, noted
from trainkit.core.inside.draws import States
from trainkit.core.inside.moment import Moment, version_of
from trainkit.core.inside.outputs import Joined, Plan
from trainkit.core.inside.padding import PaddingCheck
from trainkit.core.inside.rows import Arguments
from trainkit.core.inside.shadows import Shadows, leaves_of, refuse_strangers
from trainkit.core.nested import Build, take_apart
from trainkit.core.out_of_memory import is_out_of_memory, release
from trainkit.errors import TrainkitError


@dataclass
class Graph:
    """A chunk that ran with a graph: what it gives, and the arguments that train, by
    their places."""

    outputs: list[Any]
    leaves: dict[int, Tensor]


class Call:
    """One call of a module, cut into chunks of rows.

    Args:
        cut: what is called.
        arguments: of the call.
        plan: how outputs are joined.
        chunks: in which the rows run; default: as the cut's sizes say.
        width: how many columns there are, where chunks leave some out.
        is_checked: whether its two passes are compared.
        padding: checks that the loss uses none, where chunks leave out columns.

    Attributes:
        values: the arguments; None once autograd holds them.
        moment: what the module was like.
        trained: the places of the arguments that get a gradient.
        build: makes the output of its leaves.
        differentiable: which leaves of the output have a gradient.
        leaves: of the output, as made in the forward pass.
    """

    def __init__(
        self,
        cut: Cut,
        arguments: Arguments,
        plan: Plan,
        *,
        chunks: list[Chunk] | None = None,
        width: int = 0,
        is_checked: bool = False,
        padding: PaddingCheck | None = None,
    ) -> None:
        self._padding = padding
        self._cut, self._arguments, self._plan = cut, arguments, plan
        self._given, self._width, self._is_checked = chunks, width, is_checked
        self.values: list[Any] | None = arguments.values
        self._devices = arguments.devices
        self.moment = Moment(cut.module, cut.name, self._devices)
        self.trained = [
            i
            for i, each in enumerate(arguments.values)
            if isinstance(each, Tensor) and each.requires_grad
        ]
        self.build: Build | None = None
        self.differentiable: list[bool] = []
        self.leaves: list[Any] = []
        self._done: list[Chunk] = []
        self._kept: dict[Chunk, Graph] = {}
        self._strangers: list[weakref.ref[Tensor]] = []
        self._first: list[Any] | None = None

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
        cut, versions = self._cut, self._versions()
        begun, joined = States(self._devices, of_host=True), None
        while joined is None:
            try:
                joined = self._run(has_graph=has_graph)
            except Exception as error:
                if not (is_out_of_memory(error) and self._halves()):
                    raise
                release(error)
                begun.put_back()
            if joined and not cut.draws_of_host and begun.has_host_moved():
                # Its chunks did not keep the states of a generator that it draws from.
                cut.draws_of_host, joined = True, None
                begun.put_back()
        cut.note(joined.differs)
        self.moment.check_state()
        if versions != self._versions():
            raise TrainkitError(
                f"{cut.name}: its forward pass must not change its arguments in "
                f"place, since it runs once more in the backward pass. Give it a "
                f"clone(), or name a module within it."
            )
        return joined.values

    def _run(self, *, has_graph: bool) -> Joined:
        cut, values, rows = self._cut, self.values, self._arguments.rows
        assert values is not None
        joined = Joined(self._plan, rows, cut.name, self._width)
        self._done = self._given or cut.sizes.cut(rows)
        self._kept, self.differentiable, self._first = {}, [], None
        without = len(self._done) - has_graph * max(cut.keep, 1)
        for number, chunk in enumerate(self._done):
            chunk.states = cut.states(self._devices)
            if number >= without:
                outputs = self._run_with_graph(chunk, values)
            else:
                with torch.no_grad():
                    given = self._arguments.of(chunk, values)
                    outputs = self._outputs(chunk, given)
            if self._is_checked and not number and chunk not in self._kept:
                self._first = [_copied(each) for each in outputs]
            joined.add(chunk, outputs)
        self._ended = cut.states(self._devices)
        return joined

    def _run_with_graph(self, chunk: Chunk, values: list[Any]) -> list[Any]:
        if not self._kept and torch.is_autocast_cache_enabled():
            # It holds casted weights, without a graph if they were made without.
            torch.clear_autocast_cache()
        with self.shadows.in_place():
            graph = self._graph(chunk, values)
            self._look_for_strangers(graph)
            if self._strangers and not self.trains:
                chunk.states.put_back()
                self._look_for_strangers(self._graph(chunk, values))
        have = [_has_gradient(each) for each in graph.outputs]
        before = self.differentiable or [False] * len(have)
        self.differentiable = [a or b for a, b in zip(before, have, strict=True)]
        if self._cut.keep:
            self._kept[chunk] = graph
        return graph.outputs

    @cached_property
    def shadows(self) -> Shadows:
        """What stands for the parameters that train."""
        return self._cut.shadows(self.moment.parameters)

    def _versions(self) -> list[int]:
        return [version_of(x) for x in self.values or () if isinstance(x, Tensor)]

    def _halves(self) -> bool:
        return self._given is None and self._cut.sizes.halve(self._arguments.rows)

    def _outputs(self, chunk: Chunk, given: list[Any]) -> list[Any]:
        rows = f"rows {chunk.start} to {chunk.stop - 1} of {self._arguments.rows}"
        note = f"trainkit | {self._cut.name}: raised while it ran on {rows}"
        with noted(note), self._cut.around(self, chunk):
            fields, build = take_apart(self._cut.run(self._arguments, given))
        self.build = self.build or build  # it holds outputs: the first have no graph
        return [field.value for field in fields]

    def _graph(self, chunk: Chunk, values: Sequence[Any]) -> Graph:
        """Run a chunk with a graph that begins at its own arguments."""
        given = self._arguments.of(chunk, values)
        for index in self.trained:
            given[index] = given[index].detach().requires_grad_()
        leaves = {index: given[index] for index in self.trained}
        with torch.enable_grad():
            return Graph(self._outputs(chunk, given), leaves)

    def _look_for_strangers(self, graph: Graph) -> None:
        """Refuse tensors that train, and are neither parameters nor arguments.

        A leaf that is made anew in each run is no such thing, as that of transformers'
        `enable_input_require_grads`.
        """
        known = {id(each) for each in (*self.shadows.own, *graph.leaves.values())}
        found = [each for each in leaves_of(graph.outputs) if id(each) not in known]
        before = [each() for each in self._strangers]
        refuse_strangers(
            [
                each
                for each in found
                if isinstance(each, nn.Parameter) or any(each is x for x in before)
            ],
            self._cut.name,
        )
        self._strangers = [weakref.ref(each) for each in found]

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
        cut, shadows = self._cut, self.shadows
        if self._padding is not None:
            self._padding.look(gradients, self._plan, self._done, cut.name)
        now, pieces = cut.states(self._devices), Pieces(values, self._arguments)
        kept, self._kept = self._kept, {}
        try:
            with self.moment.again(), shadows.in_place():
                shadows.clear()
                # The last comes first: its graph may be kept.
                waiting = self._done[::-1]
                while waiting:
                    graph = kept.pop(waiting[0], None)
                    try:
                        graph = graph or self._again(waiting[0], values)
                        now.put_back()
                        self._pull(waiting[0], graph, gradients)
                        pieces.add(
                            waiting[0], {i: x.grad for i, x in graph.leaves.items()}
                        )
                        waiting.pop(0)
                        now = cut.states(self._devices)
                    except Exception as error:
                        if not (is_out_of_memory(error) and self._may_begin_again()):
                            raise
                        graph = None
                        release(error)
                        kept.clear()
                        shadows.clear()
                        pieces = Pieces(values, self._arguments)
                        waiting = self._done[::-1]
                    graph = None  # not beside the next one
                found = shadows.gradients()
        finally:
            shadows.clear()
            now.put_back()
        return [*found, *pieces.gradients(self.trained)]

    def _refuse_graph(self) -> None:
        if torch.is_grad_enabled():
            raise TrainkitError(
                f"{self._cut.name}: it runs in chunks, so that its gradient has no "
                f"gradient of its own, which create_graph=True asks for. Name another "
                f"module to cut, or leave out the gradient penalty."
            )

    def _again(self, chunk: Chunk, values: Sequence[Any]) -> Graph:
        chunk.states.put_back()
        graph = self._graph(chunk, values)
        if self._strangers:
            self._look_for_strangers(graph)
        if self._first is None or chunk.start:
            return graph
        before, self._first = self._first, None
        for one, other in zip(before, graph.outputs, strict=True):
            if isinstance(one, Tensor) and not are_close(one, other):
                raise TrainkitError(
                    f"{self._cut.name}: a chunk of rows gives other outputs when it "
                    f"runs again in the backward pass. Its forward must not change "
                    f"anything that it depends on, and must not draw from a generator "
                    f"of its own. Name a module within it that does not."
                )
        return graph

    def _may_begin_again(self) -> bool:
        """Whether the rows can run in smaller chunks. Those that drew would draw
        otherwise than in the forward pass."""
        first = self._done[0].states
        if not first.are(self._ended) or not self._halves():
            return False
        self._first, self._done = None, self._cut.sizes.cut(self._arguments.rows)
        for chunk in self._done:
            chunk.states = first
        return True

    def _pull(
        self, chunk: Chunk, graph: Graph, gradients: Sequence[Tensor | None]
    ) -> None:
        """Run the backward pass of a chunk."""
        outputs, given = [], []
        for index, output in enumerate(graph.outputs):
            if not _has_gradient(output):
                continue
            if not self.differentiable[index]:
                raise TrainkitError(
                    f"{self._cut.name}: {self._plan[index].name} has a gradient in "
                    f"some chunks of rows and none in others. Name a module within "
                    f"it, or around it."
                )
            gradient = self._part(chunk, index, gradients[index])
            if gradient is not None:
                outputs.append(output)
                given.append(gradient)
        if outputs:
            torch.autograd.backward(outputs, given)

    def _part(self, chunk: Chunk, index: int, gradient: Tensor | None) -> Tensor | None:
        """A chunk's part of the gradient of a leaf of the output."""
        joint = self._plan[index]
        if joint.dim is not None and gradient is not None:
            return chunk.part(gradient, joint.dim, joint.multiple, joint.padded)
        # A value that all chunks share is the last one's.
        return gradient if chunk.stop == self._arguments.rows else None


class Pieces:
    """The gradients of arguments: a chunk writes its rows, or adds its share.

    Args:
        values: of the arguments.
        arguments: of the call.
    """

    def __init__(self, values: Sequence[Any], arguments: Arguments) -> None:
        self._values, self._arguments = values, arguments
        self._found: dict[int, Tensor] = {}

    def add(self, chunk: Chunk, gradients: dict[int, Tensor | None]) -> None:
        """Take the gradients of a chunk's arguments; None for those it did not use."""
        arguments = self._arguments
        for index, gradient in gradients.items():
            if gradient is None:
                continue
            value, is_cut = self._values[index], arguments.cut[index]
            if index not in self._found:
                wide = value.dtype in HALF and not is_cut
                self._found[index] = torch.zeros_like(
                    value, dtype=torch.float32 if wide else value.dtype
                )
            padded = arguments.padded[index] if arguments.padded else ()
            own = chunk.part(self._found[index], 0 if is_cut else None, 1, padded)
            own.add_(gradient)

    def gradients(self, trained: Sequence[int]) -> list[Tensor | None]:
        """The gradient of each argument that trains; None where nothing came."""
        return [
            self._found[i].to(self._values[i].dtype) if i in self._found else None
            for i in trained
        ]


def _has_gradient(output: Any) -> bool:
    return isinstance(output, Tensor) and output.requires_grad


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
