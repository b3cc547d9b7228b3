"""The operations between two meetings of the chunks, which each chunk repeats."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from trainkit.core.nested import describe
from trainkit.core.tape.parts import Chunk, Slot, fill, gaps_in, tensors_in
from trainkit.core.tape.settings import Settings, Surroundings
from trainkit.core.tape.statistics import Normal
from trainkit.errors import TrainkitError

Draws = Literal["new", "again", "none"]


@dataclass(eq=False)
class Operation:
    """A call of a function that depends on the batch.

    Attributes:
        function: of torch.
        name: of it.
        args: with gaps for tensors and numbers of rows; `kwargs` likewise.
        settings: in which it runs.
        states: the random states before it, for each chunk; None if it draws nothing.
        outs: the slots of the tensors that it returns; None for an argument.
        likes: their shapes and types, in the first chunk and in the last.
        written: the slots of the arguments it writes into, and of what they are then.
        over: the slots that nothing needs after it.
        uses: the slots of its arguments.
    """

    function: Callable[..., Any]
    name: str
    args: Any
    kwargs: Any
    settings: Settings
    states: dict[int, Any] | None = None
    outs: list[int | None] = field(default_factory=list)
    likes: list[tuple[Any, Any]] = field(default_factory=list)
    written: list[tuple[int, int]] = field(default_factory=list)
    over: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        gaps = [*gaps_in(self.args), *gaps_in(self.kwargs)]
        self.uses = {each.number for each in gaps if isinstance(each, Slot)}

    def makes(self) -> set[int]:
        """The slots that it fills."""
        new = {new for _, new in self.written}
        return new.union(slot for slot in self.outs if slot is not None)

    def run(self, chunk: Chunk) -> None:
        """Repeat it for a chunk."""
        kwargs = fill(self.kwargs, chunk)
        found = tensors_in(self.function(*fill(self.args, chunk), **kwargs))
        for slot, tensor, likes in zip(self.outs, found, self.likes, strict=True):
            like = likes[chunk.is_small]
            if (tensor.shape, tensor.dtype) != like:
                raise TrainkitError(
                    f"exact BatchNorm: {self.name} returns {describe(tensor)} for one "
                    f"chunk, and shape {list(like[0])} of {like[1]} for another. All "
                    f"chunks must run alike. Keep shapes free of values, as "
                    f"torch.where() does."
                )
            if slot is not None:
                chunk.values[slot] = tensor
        for old, new in self.written:
            chunk.values[new] = chunk.values[old]

    def leave_out(self, chunk: Chunk) -> None:
        """Stand in for what it draws: by its first argument where that has the shape of
        the result, else by one number."""
        given = [chunk.values[slot] for slot in sorted(self.uses)]
        self.run(chunk)
        for slot in self.makes():
            found = chunk.values[slot]
            like = [x for x in given if x.shape == found.shape and not self.written]
            chunk.values[slot] = like[0].clone() if like else found.fill_(0.5)


@dataclass(eq=False)
class Meeting:
    """A call of a BatchNorm in training mode.

    Attributes:
        x: the slot of what it normalises.
        y: the slot of what it returns.
        weight: its place among the shared tensors, if there is one; `bias` likewise.
        normal: the statistics of all rows.
        settings: in which it runs.
        trains: whether a gradient goes through it.
        fixed: weight and bias for passes without gradients.
    """

    x: int
    y: int
    weight: int | None
    bias: int | None
    normal: Normal
    settings: Settings
    trains: bool
    fixed: list[Tensor]


@dataclass(eq=False)
class Segment:
    """The operations from one meeting of the chunks to the next.

    Attributes:
        meeting: with which it begins; the first segment has none.
        operations: in order.
        copied: slots from before it in whose memory it writes.
        made: the slots that it fills.
        needed: the slots from before it that it uses.
    """

    meeting: Meeting | None = None
    operations: list[Operation] = field(default_factory=list)
    copied: set[int] = field(default_factory=set)
    made: set[int] = field(default_factory=set)
    needed: set[int] = field(default_factory=set)

    def prune(self, wanted: Collection[int]) -> None:
        """Leave out operations that nothing needs, and note when values are over.

        Args:
            wanted: the slots that are needed behind the segment.
        """
        needed, kept, made = set(wanted), [], set[int]()
        for each in reversed(self.operations):
            makes = each.makes()
            if each.written or not needed.isdisjoint(makes):
                each.over = [*((each.uses | makes) - needed)]
                needed |= each.uses
                made |= makes
                kept.append(each)
        self.operations = kept[::-1]
        own = self.meeting
        uses = {own.x} if own else set[int]()
        self.made = made | {own.y} if own else made
        self.needed = uses.union(*(each.uses for each in kept)) - self.made

    def run(
        self,
        number: int,
        chunk: Chunk,
        surroundings: Surroundings,
        *,
        leaves: list[Tensor] | None = None,
        draws: Draws = "new",
    ) -> None:
        """Run it for a chunk, whose values from before it are there.

        Args:
            number: of the chunk.
            chunk: holds the values, and gets new ones.
            surroundings: sets the modes in which operations run.
            leaves: weight and bias of the meeting; gradients are wanted where given.
            draws: what is drawn: new numbers, those of the first time, or none.
        """
        again = leaves is not None
        for slot in self.copied & self.needed:
            chunk.values[slot] = chunk.values[slot].clone()
        if self.meeting is not None:
            self._meet(self.meeting, chunk, surroundings, leaves)
        for each in self.operations:
            surroundings.enter(each.settings, gradients=again)
            if each.states is not None and draws == "again":
                surroundings.set_random(each.states[number])
            elif each.states is not None and draws == "new":
                each.states[number] = surroundings.random()
            if each.states is None or draws != "none":
                each.run(chunk)
            else:
                each.leave_out(chunk)
            for slot in each.over:
                chunk.values.pop(slot, None)

    def _meet(
        self, meeting: Meeting, chunk: Chunk, surroundings: Surroundings, leaves: Any
    ) -> None:
        surroundings.enter(meeting.settings, gradients=False)
        with torch.set_grad_enabled(leaves is not None and meeting.trains):
            found = meeting.normal(chunk.values[meeting.x], leaves or meeting.fixed)
        chunk.values[meeting.y] = found
