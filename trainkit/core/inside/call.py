"""One call of a module that runs in chunks of rows: its forward and backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from trainkit.core.generators import States
from trainkit.core.gradients import HALF
from trainkit.core.inside.cut import Cut, Node, Shadows, strangers_of
from trainkit.core.inside.moment import Moment
from trainkit.core.inside.outputs import Joint, Plan, are_close
from trainkit.core.inside.rows import Arguments, Chunk
from trainkit.core.inside.tokens import refuse_padding
from trainkit.core.nested import Build, are_equal, with_tensors
from trainkit.core.out_of_memory import in_smaller_parts
from trainkit.errors import TrainkitError

Graph = tuple[list[Any], dict[int, Tensor]]
"""What a chunk gives that ran with a graph, and the arguments that train, by place."""


class Call:
    """One call of a module, cut into chunks of rows.

    Args:
        cut: the module that is called.
        arguments: of the call.

    Attributes:
        cut: the module.
        name: of it, for messages.
        arguments: of the call.
        sizes: of its chunks.
        moment: what the module is like.
        parameters: those of it that train.
        shadows: stand for them while chunks run.
        plan: how outputs are joined; to be found.
        is_checked: whether its two passes are compared.
        build: makes the output of its leaves.
        chunks: in which its rows have run.
    """

    plan: Plan
    is_checked = False

    def __init__(self, cut: Cut, arguments: Arguments) -> None:
        self.cut, self.name, self.arguments = cut, cut.name, arguments
        self.sizes = arguments.sizes or cut.sizes
        self.moment = Moment(cut.module, cut.name, arguments)
        self.parameters = [x for x in cut.module.parameters() if x.requires_grad]
        if cut.shadows is None or not cut.shadows.fit(self.parameters):
            cut.shadows = Shadows(cut.module, self.parameters)
        self.shadows = cut.shadows
        self._returned: list[int] = []  # the places of the tensors of the output
        self._has_gradient: list[bool] = []  # by the leaves of the output
        self.build: Build | None = None
        self.chunks: list[Chunk] = []
        self._draws = False
        self._kept: Graph | None = None
        self._first: list[Any] | None = None

    # ---- forward ---------------------------------------------------------------------

    def leaves(self) -> list[Any]:
        """Run all chunks; the leaves of the output. With gradients on, the last chunk
        keeps its graph, which shows what of the output has a gradient."""
        self._values = values = self.arguments.values
        self.arguments.values = []  # they are held once
        tensors = [i for i, x in enumerate(values) if isinstance(x, Tensor)]
        self._given = tensors  # their places
        self._trained = [i for i in tensors if values[i].requires_grad]
        has_graph, begun = torch.is_grad_enabled(), States(self.arguments.devices)
        with torch.no_grad():
            run = partial(self._run, values, begun, has_graph=has_graph)
            leaves = in_smaller_parts(run, self._halves, begun.put_back)
        self.moment.check_state(values)
        trained = [*self.parameters, *[values[i] for i in self._trained]]
        if not (has_graph and trained):
            return leaves
        self._returned = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        whole = [leaves[i] for i in self._returned]
        differentiable = [self._has_gradient[i] for i in self._returned]
        saved = [values[i] for i in self._given]
        for place in self._given:
            values[place] = None  # autograd holds it
        outputs: Any = Node.apply(self, whole, differentiable, saved, *trained)
        for place, output in zip(self._returned, outputs, strict=True):
            leaves[place] = output
        return leaves

    def _run(self, values: list[Any], begun: States, *, has_graph: bool) -> list[Any]:
        arguments = self.arguments
        joined = Joined(self.plan, self.name)
        self.chunks = arguments.chunks(self.sizes)
        self._kept = self._first = None
        self._has_gradient = [False] * len(self.plan)
        for number, chunk in enumerate(self.chunks):
            chunk.states = States(self.arguments.devices) if number else begun
            if has_graph and chunk is self.chunks[-1]:
                outputs = self._with_graph(chunk, values)
            else:
                outputs = self._outputs(arguments.of(chunk, values))
                if self.is_checked and not number:
                    self._first = with_tensors(outputs, lambda x: x.detach().clone())
            joined.add(chunk, outputs)
        self._draws = not begun.are(States(self.arguments.devices))
        return joined.values

    def _with_graph(self, chunk: Chunk, values: list[Any]) -> list[Any]:
        if torch.is_autocast_cache_enabled():
            # It holds casted weights, without a graph if they were made without.
            torch.clear_autocast_cache()
        with self.shadows.in_place():
            self._kept = outputs, leaves = self._graph(chunk, values)
        strangers_of(outputs, [*self.shadows.own, *leaves.values()], self.name)
        self._has_gradient = [
            isinstance(each, Tensor) and each.requires_grad for each in outputs
        ]
        return outputs

    def _halves(self) -> bool:
        return self.sizes.halve(self.arguments.rows)

    def _outputs(self, given: list[Any]) -> list[Any]:
        _, outputs, build = self.arguments.run(self.cut, given)
        self.build = self.build or build  # it holds outputs: the first have no graph
        return outputs

    def _graph(self, chunk: Chunk, values: Sequence[Any]) -> Graph:
        """Run a chunk with a graph that begins at its own arguments."""
        given, leaves = self.arguments.of(chunk, values), {}
        for index in self._trained:
            leaves[index] = given[index] = given[index].detach().requires_grad_()
        with torch.enable_grad():
            return self._outputs(given), leaves

    # ---- backward --------------------------------------------------------------------

    def backward(
        self, saved: Sequence[Tensor], given: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """One gradient for each parameter that trains, then for each argument.

        Args:
            saved: the tensors among the arguments.
            given: the gradients of the tensors of the output.
        """
        self.moment.check_weights()
        values, shadows = list(self._values), self.shadows
        for place, tensor in zip(self._given, saved, strict=True):
            values[place] = tensor
        gradients: list[Tensor | None] = [None] * len(self.plan)
        for place, gradient in zip(self._returned, given, strict=True):
            gradients[place] = gradient
        if self.arguments.width:
            refuse_padding(gradients, self.plan, self.chunks, self.name)
        try:
            with self.moment.again(), shadows.in_place():
                found = self._gradients(values, gradients)
                return [*shadows.gradients(), *found]
        finally:
            shadows.clear()

    def _gradients(
        self, values: Sequence[Any], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Run the backward pass of all chunks; the gradients of arguments."""
        found = dict[int, Tensor]()

        def run() -> None:
            for chunk in reversed(self.chunks):  # the last comes first: it is kept
                self._pull(chunk, values, gradients, found)

        def begin_again() -> None:
            self.shadows.clear()
            found.clear()

        in_smaller_parts(run, self._may_begin_again, begin_again)
        return [
            found[i].to(values[i].dtype) if i in found else None for i in self._trained
        ]

    def _pull(
        self,
        chunk: Chunk,
        values: Sequence[Any],
        gradients: Sequence[Tensor | None],
        found: dict[int, Tensor],
    ) -> None:
        """Run the backward pass of a chunk, and add up the gradients of arguments: its
        rows, or its share."""
        graph, self._kept = self._kept, None  # before memory may run out
        roots, leaves = self._again(chunk, values) if graph is None else graph
        outputs, given = [], []
        for output, joint, gradient, is_expected in zip(
            roots, self.plan, gradients, self._has_gradient, strict=True
        ):
            if not (isinstance(output, Tensor) and output.requires_grad):
                continue
            if not is_expected:
                raise TrainkitError(
                    f"{self.name}: {joint.name} has a gradient in some chunks of rows "
                    f"and none in others. Name a module within it, or around it."
                )
            if not joint.axes and chunk is not self.chunks[-1]:
                continue  # a value that all chunks share is the last one's
            if gradient is not None:
                outputs.append(output)
                given.append(chunk.of(gradient, joint.axes))
        if outputs:
            torch.autograd.backward(outputs, given)
        for index, leaf in leaves.items():
            if leaf.grad is None:
                continue
            value, arguments = values[index], self.arguments
            if index not in found:
                wide = value.dtype in HALF and not arguments.has_rows(index)
                dtype = torch.float32 if wide else value.dtype
                found[index] = torch.zeros_like(value, dtype=dtype)
            chunk.of(found[index], arguments.axes[index]).add_(leaf.grad)

    def _again(self, chunk: Chunk, values: Sequence[Any]) -> Graph:
        """Run a chunk as in the forward pass. What backward passes draw is another draw
        for each chunk, and not that of the forward pass."""
        if self._draws:
            now = States(self.arguments.devices)
            chunk.states.put_back()
            try:
                graph = self._graph(chunk, values)
            finally:
                now.put_back()
        else:
            graph = self._graph(chunk, values)
        if self._first is None or chunk is not self.chunks[0]:
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
        if self._draws or not self._halves():
            return False
        self._first = None
        self.chunks = self.arguments.chunks(self.sizes)
        return True


class Joined:
    """The leaves of a call's output, with room for all rows.

    Args:
        plan: along which dimension each one is joined.
        name: of the module, for messages.

    Attributes:
        values: the leaves; complete when each chunk was added.
    """

    def __init__(self, plan: Plan, name: str) -> None:
        self._plan, self._name = plan, name
        self.values: list[Any] = []

    def add(self, chunk: Chunk, outputs: Sequence[Any]) -> None:
        """Write a chunk's outputs to their place."""
        if len(outputs) != len(self._plan):
            self._refuse(
                f"the number of its outputs depends on the rows: {len(self._plan)} "
                f"before, {len(outputs)} now"
            )
        whole, values = self.values or [None] * len(outputs), list[Any]()
        for joint, before, value in zip(self._plan, whole, outputs, strict=True):
            if joint.axes:
                values.append(self._with_rows(joint, before, value, chunk))
                continue
            if self.values and not _are_same(before, value):
                self._refuse(
                    f"{joint.name} has no rows, and must be the same for all chunks, "
                    f"but it was {_shown(before)} for one and {_shown(value)} for "
                    f"another"
                )
            is_tensor = isinstance(value, Tensor)
            values.append(value.detach().clone() if is_tensor else value)
        self.values = values

    def _with_rows(self, joint: Joint, whole: Any, value: Any, chunk: Chunk) -> Any:
        is_tensor = isinstance(value, Tensor)
        if whole is None and is_tensor and value.ndim > joint.axes[0].dim:
            whole = chunk.room(value, joint.axes)
        place = None if whole is None else chunk.of(whole, joint.axes)
        got = (value.shape, value.dtype) if is_tensor else type(value)
        wanted = None if place is None else (place.shape, place.dtype)
        if got != wanted or place is None:
            self._refuse(
                f"{joint.name} must have one shape and dtype beside its rows, to be "
                f"joined: {wanted or 'a tensor'} was expected for a chunk, received "
                f"{got}"
            )
        place.copy_(value.detach())
        return whole

    def _refuse(self, why: str) -> NoReturn:
        raise TrainkitError(
            f"{self._name}: {why}. Name a module within it, or around it."
        )


def _are_same(value: Any, other: Any) -> bool:
    """Whether two outputs without rows are one. On a device only their shapes are
    compared until rows are looked at again, since reading them waits."""
    if not (isinstance(value, Tensor) and isinstance(other, Tensor)):
        return are_equal(value, other)
    if value.device.type == "cpu":
        return are_close(value, other)
    return (value.shape, value.dtype) == (other.shape, other.dtype)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor) and value.numel() > 1:
        return f"another tensor of shape {list(value.shape)}"
    return repr(value.item() if isinstance(value, Tensor) else value)
