"""One call of a module that runs in chunks: its output, and its backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainkit.core._compat import keeps_graph
from trainkit.core.batch_norm.statistics import Meeting
from trainkit.core.inside.moment import Surroundings
from trainkit.core.tape.operations import (
    Chunk,
    Operation,
    Segment,
    Store,
)
from trainkit.core.tape.rows import Layout


@dataclass(eq=False)
class Tape:
    """What a forward has done, for each chunk to do again.

    Attributes:
        name: of the module, for messages.
        layout: the chunks.
        store: the values that cross meetings.
        surroundings: of the operations.
        segments: in order.
        shared: the tensors that all chunks share, with their graphs.
        fixed: the same without graphs, with the data that they had then.
        trains: the slots of values to which gradients go.
        num_arguments: how many were cut; theirs are the first slots.
        outputs: slots and row dimensions of what the call returns.
    """

    name: str
    layout: Layout
    store: Store
    surroundings: Surroundings
    segments: list[Segment] = field(default_factory=lambda: [Segment()])
    shared: list[Tensor] = field(default_factory=list)
    fixed: list[Tensor] = field(default_factory=list)
    trains: set[int] = field(default_factory=set)
    num_arguments: int = 0
    outputs: dict[int, int] = field(default_factory=dict)

    @property
    def differentiable(self) -> list[bool]:
        """Which outputs have a gradient."""
        return [slot in self.trains for slot in self.outputs]

    def tidy(self) -> None:
        """Keep no more than the backward pass needs."""
        wanted = {*self.outputs}
        for segment in reversed(self.segments):
            segment.prune(wanted)
            wanted |= segment.needed
        needed = set().union(*(each.needed for each in self.segments))
        self.store.drop(self.store.slots() - needed)

    def trains_through(self, operation: Operation) -> bool:
        """Whether a gradient goes through an operation."""
        if not operation.modes[0] or operation.name in ("detach", "data"):
            return False
        return not operation.uses.isdisjoint(self.trains) or any(
            self.shared[place].requires_grad for place in operation.shared
        )

    def eps(self) -> float:
        """How exact the least exact type is in which it computes."""
        operations = [each for segment in self.segments for each in segment.operations]
        types = {like[0][1] for each in operations for like in each.likes}
        has_eps = (each for each in types if each.is_floating_point or each.is_complex)
        return max((torch.finfo(each).eps for each in has_eps), default=0.0)

    # ---- backward --------------------------------------------------------------------

    def backward(
        self, saved: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The gradients of the arguments, and of the tensors that chunks share.

        Args:
            saved: what autograd has held.
            gradients: of the outputs.
        """
        numbers = range(len(self.layout.sizes))
        chunks = Store(len(numbers), self.store.device)
        pairs = zip(self.outputs.items(), gradients, strict=True)
        for (slot, dim), gradient in pairs:
            if gradient is not None and slot in self.trains:
                for number in numbers:
                    piece = self.layout.piece(gradient, number, dim)
                    chunks.add(number, slot, piece)
        shadows = [each.detach() for each in self.fixed]
        for shadow, each in zip(shadows, self.shared, strict=True):
            shadow.requires_grad_(each.requires_grad)
        states = self.surroundings.random()
        try:
            with self.surroundings.kept():
                for segment in reversed(self.segments):
                    self._backward(segment, chunks, shadows)
        finally:
            states.put_back()
        found: list[Tensor | None] = []
        for slot in range(self.num_arguments):
            has = [number for number in numbers if chunks.has(number, slot)]
            pieces = [chunks.pop(number, slot) for number in has]
            found.append(torch.cat(pieces) if pieces else None)
        if not keeps_graph():
            self.store.drop(self.store.slots())
        return [*found, *[each.grad for each in shadows]]

    def _backward(
        self, segment: Segment, gradients: Store, shadows: list[Tensor]
    ) -> None:
        """Run a segment again for each chunk, and back."""
        meeting, made, needed = segment.meeting, segment.made, segment.needed
        weights = [] if meeting is None else meeting.weights
        leaves = [each.detach().requires_grad_() for each in weights]
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
            chunk = Chunk(values, shadows, is_small=self.layout.is_small(number))
            with torch.enable_grad():
                segment.run(number, chunk, self.surroundings, leaves=leaves)
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
        found = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
        for place, gradient in zip(meeting.places, found, strict=True):
            if place is not None and shadows[place].requires_grad:
                shadow, own = shadows[place], gradient.to(shadows[place].dtype)
                shadow.grad = own.clone() if shadow.grad is None else shadow.grad + own
        sums = meeting.ranks.sum_(torch.stack(found))
        if meeting.x not in self.trains:
            return
        for number in range(len(self.layout.sizes)):
            x = self.store.get(number, meeting.x)
            lacking = meeting.correction(x, sums)
            if gradients.has(number, meeting.x):
                lacking += gradients.pop(number, meeting.x)
            gradients.put(number, meeting.x, lacking)
