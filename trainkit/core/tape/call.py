"""One call of a module that runs in chunks: its output, and its backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit.core._compat import keeps_graph
from trainkit.core.tape.parts import Chunk
from trainkit.core.tape.rows import Layout
from trainkit.core.tape.segments import Meeting, Segment
from trainkit.core.tape.settings import Surroundings
from trainkit.core.tape.store import Store
from trainkit.errors import TrainkitError


@dataclass(eq=False)
class Tape:
    """What a forward has done, for each chunk to do again.

    Attributes:
        segments: in order.
        layout: the chunks.
        store: the values that cross meetings.
        shared: the tensors that all chunks share, with their graphs.
        fixed: the same without graphs.
        trains: the slots of values to which gradients go.
        surroundings: of the operations.
        arguments: the slots of those that were cut.
        outputs: slots and row dimensions of what the call returns.
    """

    segments: list[Segment]
    layout: Layout
    store: Store
    shared: list[Tensor]
    fixed: list[Tensor]
    trains: set[int]
    surroundings: Surroundings
    arguments: list[int]
    outputs: list[tuple[int, int]]

    def tidy(self) -> None:
        """Keep no more than the backward pass needs."""
        wanted = {slot for slot, _ in self.outputs}
        for segment in reversed(self.segments):
            segment.prune(wanted)
            wanted |= segment.needed
        needed = set().union(*(each.needed for each in self.segments))
        self.store.drop(self.store.slots() - needed)

    def piece(self, tensor: Tensor, number: int, dim: int) -> Tensor:
        """The rows of a chunk."""
        layout = self.layout
        if not layout.last:
            return tensor
        each = tensor.shape[dim] // layout.rows
        start, rows = layout.starts[number], layout.sizes[number]
        return tensor.narrow(dim, start * each, rows * each)

    def is_small(self, number: int) -> bool:
        """Whether a chunk has one row less than the first."""
        return self.layout.sizes[number] < self.layout.sizes[0]

    # ---- backward --------------------------------------------------------------------

    def backward(
        self, gradients: Sequence[Tensor | None]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """The gradients of the arguments, and of the tensors that chunks share."""
        numbers = range(len(self.layout.sizes))
        chunks = Store(len(numbers), self.store.transport)
        for (slot, dim), gradient in zip(self.outputs, gradients, strict=True):
            if gradient is not None and slot in self.trains:
                for number in numbers:
                    chunks.add(number, slot, self.piece(gradient, number, dim))
        shadows = [each.detach() for each in self.fixed]
        for shadow, each in zip(shadows, self.shared, strict=True):
            shadow.requires_grad_(each.requires_grad)
        states = self.surroundings.random()
        try:
            with self.surroundings.kept():
                for segment in reversed(self.segments):
                    self._backward(segment, chunks, shadows)
        finally:
            self.surroundings.set_random(states)
        found: list[Tensor | None] = []
        for slot in self.arguments:
            has = [number for number in numbers if chunks.has(number, slot)]
            pieces = [chunks.pop(number, slot) for number in has]
            found.append(torch.cat(pieces) if pieces else None)
        if not keeps_graph():
            self.store.drop(self.store.slots())
        return found, [each.grad for each in shadows]

    def _backward(
        self, segment: Segment, gradients: Store, shadows: list[Tensor]
    ) -> None:
        """Run a segment again for each chunk, and back."""
        meeting, made, needed = segment.meeting, segment.made, segment.needed
        fixed = [] if meeting is None else meeting.fixed
        leaves = [each.detach().requires_grad_() for each in fixed]
        for number in range(len(self.layout.sizes)):
            ends = [slot for slot in made if gradients.has(number, slot)]
            if not ends:
                continue
            values, begins = {}, {}
            for slot in needed:
                each = self.store.get(number, slot).detach()
                if slot in self.trains:
                    begins[slot] = each.requires_grad_()
                values[slot] = each
            chunk = Chunk(values, shadows, is_small=self.is_small(number))
            with torch.enable_grad():
                segment.run(
                    number, chunk, self.surroundings, leaves=leaves, draws="again"
                )
            given = [gradients.pop(number, slot) for slot in ends]
            pairs = [
                (values[slot], gradient)
                for slot, gradient in zip(ends, given, strict=True)
                if values[slot].requires_grad
            ]
            if pairs:
                roots, into = zip(*pairs, strict=True)
                torch.autograd.backward(roots, into)
            for slot, each in begins.items():
                if each.grad is not None:
                    gradients.add(number, slot, each.grad)
        if meeting is not None and meeting.trains:
            self._correct(meeting, leaves, gradients, shadows)

    def _correct(
        self,
        meeting: Meeting,
        leaves: list[Tensor],
        gradients: Store,
        shadows: list[Tensor],
    ) -> None:
        """Add to the gradients before a BatchNorm what its statistics owe."""
        normal = meeting.normal
        found = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
        for place, gradient in zip((meeting.weight, meeting.bias), found, strict=True):
            if place is not None and shadows[place].requires_grad:
                shadow, own = shadows[place], gradient.to(shadows[place].dtype)
                shadow.grad = own.clone() if shadow.grad is None else shadow.grad + own
        sums = normal.ranks.sum_(torch.stack(found))
        if meeting.x not in self.trains:
            return
        weight, bias = normal.correction(leaves[0].detach(), sums)
        for number in range(len(self.layout.sizes)):
            x = self.store.get(number, meeting.x)
            lacking = F.batch_norm(
                x, normal.mean, normal.var, weight, bias, False, 0.0, normal.eps
            )
            if gradients.has(number, meeting.x):
                lacking += gradients.pop(number, meeting.x)
            gradients.put(number, meeting.x, lacking)


class Taped(torch.autograd.Function):
    """Stands in the graph for a call that ran in chunks."""

    @staticmethod
    def forward(ctx: Any, tape: Tape, outputs: list[Tensor], *inputs: Tensor) -> Any:
        ctx.tape = tape
        # torch refuses tensors that have been changed since.
        ctx.save_for_backward(*inputs[: len(tape.arguments)], *tape.fixed)
        pairs = zip(outputs, tape.outputs, strict=True)
        ctx.mark_non_differentiable(
            *(each for each, (slot, _) in pairs if slot not in tape.trains)
        )
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:  # pyright: ignore
        if torch.is_grad_enabled():
            raise TrainkitError(
                "exact BatchNorm: the module runs in chunks, so that its gradient has "
                "no gradient of its own, which create_graph=True asks for. Leave out "
                "the gradient penalty, or take exact BatchNorm off the module."
            )
        _ = ctx.saved_tensors
        arguments, shared = ctx.tape.backward(gradients)
        return None, None, *arguments, *shared
