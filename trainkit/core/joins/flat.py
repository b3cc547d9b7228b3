"""A window in segments between BatchNorm layers: what is in memory does not grow with
the window.

All micro-batches run through one segment before any runs through the next. What waits
between segments is kept by a transport. In the backward pass the segments run again,
from the last to the first, each with a graph of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainkit.core._compat import without_gradient_hooks
from trainkit.core.batch_norm.layers import listed
from trainkit.core.inside.draws import Draws, are_same, states_of_host, torch_states
from trainkit.core.inside.moment import Moment, version_of
from trainkit.core.inside.rows import are_close
from trainkit.core.inside.sums import Sums
from trainkit.core.joins.layers import Moves, devices_of
from trainkit.core.joins.left import Left
from trainkit.core.joins.net import Gradients, Net
from trainkit.core.joins.program import Constant, Program, Segment, Untraceable
from trainkit.core.joins.replay import Replay
from trainkit.core.joins.statistics import Normal, combined, num_entries, partial
from trainkit.core.joins.waiting import Waiting
from trainkit.errors import TrainkitError


@dataclass
class _Graph:
    """A segment that ran with a graph, for one micro-batch.

    Attributes:
        leaves: of its inputs that train, by their names.
        normals: with copies of weights and biases of their own.
        outputs: by their names.
    """

    leaves: dict[str, Tensor]
    normals: list[Normal]
    outputs: dict[str, Any]


class FlatPass:
    """One call of a module by all micro-batches of a window, segment by segment.

    Args:
        net: which is called.
        program: its forward in segments.
        draws: keeps the states of generators.
        moment: what the module is like.
        moves: whether running statistics move.
    """

    def __init__(
        self,
        net: Net,
        program: Program,
        draws: Draws,
        moment: Moment,
        *,
        moves: bool = True,
    ) -> None:
        self._net, self._program = net, program
        self._draws, self._moment = draws, moment
        self._must_move = moves
        self._normals: list[Normal] = []
        self._window: list[Waiting] = []
        self._kept: _Graph | None = None
        self._moves, self._states = Moves(net.layers), [torch.empty(0)]
        self.build = program.build
        self.differentiable: list[bool] = []

    # ---- forward ---------------------------------------------------------------------

    def forward(self, arguments: Sequence[list[Any]]) -> None:
        """Run the module on the arguments of each micro-batch."""
        program, has_graph = self._program, torch.is_grad_enabled()
        self._devices = devices_of(value for each in arguments for value in each)
        self._values = arguments
        named = [program.by_name(each) for each in arguments]
        self._window = [Waiting(each, self._net.transport) for each in named]
        self._first_use = self._first_uses(has_graph=has_graph)
        before = states_of_host()
        if not program.is_proven:
            self._draws.look(self._net.module)
            self._draws.of_host = True  # it may draw from them
        with torch.no_grad(), self._net.around(0):
            for number in range(len(program.segments)):
                self._forward(number, has_graph=has_graph)
        if not program.is_proven:
            self._draws.of_host = False
            self._draws.note(before)
            self._prove()
        if moved := self._moment.moved():
            raise TrainkitError(
                f"{self._net.name}: in segments its forward pass runs twice, and it "
                f'moves {listed(moved)}. Use memory="device".'
            )
        if self._must_move:
            self._moves.make()
        last = program.leaves(self._window[-1])
        self.differentiable = [
            self._is_differentiable(name, value)
            for name, value in zip(program.results, last, strict=True)
        ]

    def leaves(self, index: int) -> list[Any]:
        """The leaves of a micro-batch's output, which have no graph; to be had once."""
        program = self._program
        if index + 1 < len(self._window):
            self._window[index + 1].fetch(program.given_back)
        found = program.leaves(self._window[index])
        for name in program.given_back - self._first_use.keys():
            self._window[index].drop(name)
        return [x.detach() if isinstance(x, Tensor) else x for x in found]

    def _first_uses(self, *, has_graph: bool) -> dict[str, int]:
        """The first segment that gets each value again in the backward pass."""
        found: dict[str, int] = {}
        for number, segment in enumerate(self._program.segments):
            if has_graph and self._pulls(number):
                for name in segment.inputs:
                    found.setdefault(name, number)
        return found

    def _pulls(self, number: int) -> bool:
        """Whether a segment has a backward pass."""
        segment, program = self._program.segments[number], self._program
        return segment.trains or not program.trains.isdisjoint(segment.inputs)

    def _forward(self, number: int, *, has_graph: bool) -> None:
        """Run a segment for all micro-batches, up to the layer at its end."""
        segment = self._program.segments[number]
        end, parts, entries = segment.end, [], 0
        done = self._program.last_used(number) - self._first_use.keys()
        for index, waiting in enumerate(self._window):
            if index + 1 < len(self._window):
                self._window[index + 1].fetch(segment.inputs)
            elif end is not None:
                following = self._program.segments[number + 1]
                self._window[0].fetch(following.inputs)
            self._net.switched(index)
            waiting.put_back.append(self._put_back())
            is_last = end is None and index + 1 == len(self._window)
            if is_last and has_graph:
                if torch.is_autocast_cache_enabled():
                    torch.clear_autocast_cache()  # casted weights without a graph
                self._kept = self._graph(number, waiting)
                outputs = self._kept.outputs
            else:
                outputs = self._outputs(number, waiting)
            for name, value in outputs.items():
                waiting.hold(name, value)
            if end is not None:
                x = outputs.get(end.value)
                x = waiting.get(end.value) if x is None else x
                end.layer._check_input_dim(x)
                entries += num_entries(x)
                parts.append(partial(x))
            for name in done:
                waiting.drop(name)
        if end is not None:
            ranks = self._net.sharing.of(end.layer)
            statistics = combined(parts, entries, ranks, end.name)
            self._normals.append(Normal.of(end.layer, statistics))
            self._moves.add(end.layer, statistics)

    def _outputs(self, number: int, waiting: Waiting) -> dict[str, Any]:
        segment, program = self._program.segments[number], self._program
        values = [waiting.get(name) for name in segment.inputs]
        for place, name in enumerate(segment.inputs):
            if program.may_write(number, name) and isinstance(values[place], Tensor):
                values[place] = values[place].clone()
        found = segment.graph(*values, *(self._normals[n] for n in segment.joins))
        if not program.is_proven:
            for name, value in zip(segment.inputs, values, strict=True):
                if isinstance(value, Tensor) and version_of(value):
                    self._note_written(number, name)
        return dict(zip(segment.outputs, found, strict=True))

    def _note_written(self, number: int, name: str) -> None:
        program = self._program
        program.written.add((number, name))
        if any(name in each.inputs for each in program.segments[number + 1 :]):
            raise Untraceable(
                "a tensor that is passed on over a layer is changed in place, and "
                "used again behind the next one"
            )

    def _put_back(self) -> Any:
        """What restores the random states of this moment."""
        states = torch_states(self._devices)
        if self._draws.of_host or not are_same(states, self._states):
            self._back = self._draws.keep(self._devices, states)
            self._states = states
        return self._back

    def _is_differentiable(self, name: Any, value: Any) -> bool:
        if isinstance(name, Constant) or self._kept is None:
            return False
        found = self._kept.outputs.get(name)
        if isinstance(found, Tensor):
            return found.requires_grad
        can = isinstance(value, Tensor) and value.is_floating_point()
        return can and name in self._program.trains

    def _prove(self) -> None:
        """Compare the outputs of the first micro-batch with the module's own, by the
        same statistics and draws."""
        first, program = self._window[0], self._program
        after, left = self._draws.keep(self._devices), Left(self._net.module)
        self._net.switched(0)
        ends = [each.end for each in program.segments if each.end is not None]
        try:
            replay = Replay(ends, self._normals, first.put_back)
            with torch.no_grad():
                found = replay.run(self._net, self._values[0])
        finally:
            after()
        for one, other in zip(program.leaves(first), found, strict=True):
            if isinstance(one, Tensor) and not are_close(one, other):
                raise Untraceable("as it was traced, its outputs are others")
        if names := left.since():
            raise Untraceable(f"its forward leaves tensors in {listed(names)}")
        program.is_proven = True

    # ---- backward --------------------------------------------------------------------

    def give(self, index: int, gradients: Sequence[Tensor | None]) -> None:
        """Add to the gradients of the leaves of a micro-batch's output."""
        for name, gradient in zip(self._program.results, gradients, strict=True):
            if gradient is not None and not isinstance(name, Constant):
                self._window[index].add(name, gradient)

    def backward(self) -> Gradients:
        """The gradients of all that trains, by those that were given."""
        self._moment.check_weights()
        parameters = self._moment.parameters
        self._index = {id(each): n for n, each in enumerate(parameters)}
        self._sums = Sums(parameters)
        self._sums_of: dict[int, Tensor] = {}
        now = self._draws.keep(self._devices)
        try:
            with self._moment.again(), torch.no_grad():
                numbers = reversed(range(len(self._program.segments)))
                left = [number for number in numbers if self._pulls(number)]
                for number, following in zip(left, [*left[1:], None], strict=True):
                    self._backward(number, following)
                found = [
                    self._program.in_order(values, self._of_arguments(values, waiting))
                    for values, waiting in zip(self._values, self._window, strict=True)
                ]
        finally:
            now()
        self._window = []
        return Gradients(self._sums.results(), found)

    def _of_arguments(
        self, values: Sequence[Any], waiting: Waiting
    ) -> dict[str, Tensor | None]:
        return {
            name: self._whole_gradient(name, value, waiting)
            for name, value in self._program.by_name(values).items()
            if value.requires_grad
        }

    def _backward(self, number: int, following: int | None) -> None:
        """Run a segment again for all micro-batches, the last first, and pull.

        Args:
            number: of the segment.
            following: the number of the segment that comes next.
        """
        segment = self._program.segments[number]
        sums: list[Tensor | None] = [None] * len(segment.joins)
        for index in reversed(range(len(self._window))):
            if index:
                self._fetch(number, self._window[index - 1])
            elif following is not None:
                self._fetch(following, self._window[-1])
            waiting, graph = self._window[index], self._kept
            self._kept = None
            if graph is None:
                waiting.put_back[number]()
                graph = self._graph(number, waiting)
            self._pull(segment, graph, waiting, sums)
            for name in segment.inputs:
                if self._first_use[name] == number:
                    waiting.drop(name)
        for n, found in zip(segment.joins, sums, strict=True):
            if found is not None:
                end = self._program.segments[n].end
                assert end is not None
                self._give([end.layer.weight, end.layer.bias], list(found))
                # All ranks' micro-batches have been normalised together.
                self._sums_of[n] = self._net.sharing.of(end.layer).sum_(found.clone())

    def _fetch(self, number: int, waiting: Waiting) -> None:
        """Ask for what the backward pass of a segment needs of a micro-batch."""
        segment = self._program.segments[number]
        waiting.fetch(segment.inputs)
        waiting.fetch_gradients([*segment.outputs, *segment.inputs])

    def _graph(self, number: int, waiting: Waiting) -> _Graph:
        """Run a segment with a graph that begins at its inputs."""
        segment, values = self._program.segments[number], []
        leaves: dict[str, Tensor] = {}
        with torch.enable_grad():
            for name in segment.inputs:
                value = waiting.get(name)
                if isinstance(value, Tensor):
                    if name in self._program.trains and value.is_floating_point():
                        value = leaves[name] = value.detach().requires_grad_()
                    if self._program.may_write(number, name):
                        value = value.clone()
                values.append(value)
            normals = [
                replace(
                    each,
                    weight=each.weight.detach().requires_grad_(),
                    bias=each.bias.detach().requires_grad_(),
                )
                for each in (self._normals[n] for n in segment.joins)
            ]
            found = segment.graph(*values, *normals)
        return _Graph(leaves, normals, dict(zip(segment.outputs, found, strict=True)))

    def _pull(
        self,
        segment: Segment,
        graph: _Graph,
        waiting: Waiting,
        sums: list[Tensor | None],
    ) -> None:
        """Add the gradients of one micro-batch's segment to those of its inputs.

        Args:
            segment: which ran.
            graph: of it.
            waiting: what waits of the micro-batch.
            sums: of the layers that it begins with, over the micro-batches so far.
        """
        outputs, given = [], []
        for name, value in graph.outputs.items():
            if not (isinstance(value, Tensor) and value.requires_grad):
                continue
            gradient = self._whole_gradient(name, value, waiting)
            if gradient is not None:
                outputs.append(value)
                given.append(gradient)
        if not outputs:
            return
        own = segment.parameters
        sources = [*graph.leaves.values()]
        for each in graph.normals:
            sources += [each.weight, each.bias]
        with without_gradient_hooks(p for p in own if p._backward_hooks):
            pulled = torch.autograd.grad(
                outputs, [*sources, *own], given, allow_unused=True
            )
        found = iter(pulled)
        for name in graph.leaves:
            gradient = next(found)
            if gradient is not None:
                waiting.add(name, gradient)
        for place, before in enumerate(sums):
            by_weight, by_bias = next(found), next(found)
            if by_weight is not None:
                both = torch.stack([by_weight, by_bias])
                sums[place] = both if before is None else before + both
        self._give(own, list(found))

    def _whole_gradient(
        self, name: str, value: Tensor, waiting: Waiting
    ) -> Tensor | None:
        """The gradient of a value, with what the layers add that it came to."""
        gradient = waiting.gradient(name)
        for n, sums in self._sums_of.items():
            end = self._program.segments[n].end
            if end is not None and end.value == name:
                more = self._normals[n].correction(value.detach(), sums)
                gradient = more if gradient is None else gradient + more
        return gradient

    def _give(
        self, parameters: Sequence[Any], gradients: Sequence[Tensor | None]
    ) -> None:
        """Add to the gradients of some parameters, those that train."""
        row: list[Tensor | None] = [None] * len(self._moment.parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if id(parameter) in self._index and gradient is not None:
                row[self._index[id(parameter)]] = gradient.to(parameter.dtype)
        self._sums.add(row)
