"""A window in segments between BatchNorm layers: what is in memory does not grow with
the window.

All micro-batches run through one segment before any runs through the next. What waits
between segments is kept by a transport. In the backward pass the segments run again,
from the last to the first, each with a graph of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.core._compat import uncached_weights, without_gradient_hooks
from trainkit.core.batch_norm.layers import listed
from trainkit.core.inside.moment import Moment, version_of
from trainkit.core.joins.draws import (
    Draws,
    are_same,
    put_back_on_host,
    states_of_host,
    torch_states,
)
from trainkit.core.joins.layers import Moves, devices_of
from trainkit.core.joins.left import Left
from trainkit.core.joins.net import Gradients, Net
from trainkit.core.joins.program import Constant, Program, Segment, Untraceable
from trainkit.core.joins.proof import prove
from trainkit.core.joins.segments import Graph, Segments, can_train
from trainkit.core.joins.statistics import Normal, combined, num_entries, partial
from trainkit.core.joins.sums import Sums
from trainkit.core.joins.waiting import Waiting
from trainkit.errors import TrainkitError


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
        self._window: list[Waiting] = []
        self._kept: Graph | None = None
        self.build = program.build
        self.differentiable: list[bool] = []

    # ---- forward ---------------------------------------------------------------------

    def forward(self, arguments: Sequence[list[Any]]) -> None:
        """Run the module on the arguments of each micro-batch."""
        program, draws = self._program, self._draws
        self._devices = devices_of(value for each in arguments for value in each)
        self._values = arguments
        draws.look(self._net.module)
        is_kept = draws.of_host
        draws.of_host = is_kept or not program.is_proven  # it may draw from them
        hosts, again = states_of_host(), draws.keep(self._devices)
        left = Left(self._net.module)
        try:
            with uncached_weights():
                self._segments = Segments(self._net, program)
                self._moves = Moves(self._net.layers)
                self._run()
                was_kept, draws.of_host = draws.of_host, is_kept
                if draws.note(hosts) and not was_kept:
                    put_back_on_host(hosts)
                    again()
                    self._run()
                if not program.is_proven or left.since():
                    self._prove()  # a second run leaves nothing if that is a cache
        except Exception as error:
            draws.of_host = is_kept
            program.is_proven &= not isinstance(error, Untraceable)
            if not program.is_proven:
                put_back_on_host(hosts)
                again()
            raise
        self._check_moved()
        if self._must_move:
            self._moves.make()
        last = program.leaves(self._window[-1])
        self.differentiable = [
            self._is_differentiable(name, value)
            for name, value in zip(program.results, last, strict=True)
        ]

    def _run(self) -> None:
        """Run all segments. Another run, with the same draws, has the statistics of the
        first, so that no rank waits for others there."""
        program, has_graph = self._program, torch.is_grad_enabled()
        named = [program.by_name(each) for each in self._values]
        self._window = [Waiting(each, self._net.transport) for each in named]
        self._first_use = self._first_uses(has_graph=has_graph)
        self._kept, self._states = None, [torch.empty(0)]
        versions = list(map(version_of, program.constants))
        with torch.no_grad(), self._net.around(0):
            for number in range(len(program.segments)):
                self._forward(number, has_graph=has_graph)
        if versions != list(map(version_of, program.constants)):
            raise Untraceable(
                "it changes a tensor in place that is one for all micro-batches"
            )

    def _check_moved(self) -> None:
        if moved := self._moment.moved():
            raise TrainkitError(
                f"{self._net.name}: in segments its forward pass runs twice, and it "
                f'moves {listed(moved)}. Use memory="device".'
            )

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
        is_known = number < len(self._segments.normals)
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
                self._kept = self._segments.graph(number, waiting)
                outputs = self._kept.outputs
            else:
                outputs = self._segments.outputs(number, waiting)
            for name, value in outputs.items():
                waiting.hold(name, value)
            if end is not None and not is_known:
                x = outputs.get(end.value)
                x = waiting.get(end.value) if x is None else x
                end.layer._check_input_dim(x)
                entries += num_entries(x)
                parts.append(partial(x))
            for name in done:
                waiting.drop(name)
        if end is not None and not is_known:
            ranks = self._net.sharing.of(end.layer)
            statistics = combined(parts, entries, ranks, end.name)
            self._segments.normals.append(Normal.of(end.layer, statistics))
            self._moves.add(end.layer, statistics)

    def _put_back(self) -> Any:
        """What restores the random states of this moment."""
        states = torch_states(self._devices)
        draws = self._draws
        if draws.of_host or draws.own or not are_same(states, self._states):
            self._back = draws.keep(self._devices, states)
            self._states = states
        return self._back

    def _is_differentiable(self, name: Any, value: Any) -> bool:
        if isinstance(name, Constant) or self._kept is None:
            return False
        found = self._kept.outputs.get(name)
        if isinstance(found, Tensor):
            return found.requires_grad
        return can_train(value) and name in self._program.trains

    def _prove(self) -> None:
        first, after = self._window[0], self._draws.keep(self._devices)
        outputs = self._program.leaves(first)
        try:
            prove(
                self._net,
                self._program,
                self._segments.normals,
                first.put_back,
                self._values[0],
                outputs,
            )
        finally:
            after()

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
            with self._moment.again(), uncached_weights(), torch.no_grad():
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
                graph = self._segments.graph(number, waiting)
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

    def _pull(
        self,
        segment: Segment,
        graph: Graph,
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
                more = self._segments.normals[n].correction(value.detach(), sums)
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
