"""The operations between two meetings of the chunks, which each chunk repeats; the
values that cross a meeting, on the host where a GPU computes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainkit.core.batch_norm.statistics import Meeting
from trainkit.core.inside.moment import Modes, Surroundings
from trainkit.core.nested import describe
from trainkit.core.tape.rows import NumberOfRows
from trainkit.errors import TrainkitError

Build = Callable[[Iterator[Any]], Any]


@dataclass(frozen=True)
class Gap:
    """A place for a value that each chunk has, or for a tensor that all share."""

    number: int
    is_shared: bool = False


@dataclass
class Chunk:
    """What fills the gaps for one chunk.

    Attributes:
        values: by the numbers of their slots.
        shared: the tensors that all chunks share.
        is_small: whether it has one row less than the first chunk.
    """

    values: dict[int, Tensor]
    shared: list[Tensor]
    is_small: bool = False

    def fill(self, gap: Gap | NumberOfRows) -> Any:
        """What this chunk has in a gap."""
        if isinstance(gap, NumberOfRows):
            return gap.each[self.is_small]
        return (self.shared if gap.is_shared else self.values)[gap.number]


def take_apart(value: Any, parts: list[Any]) -> Build:
    """Add all that is in a value to `parts`; what builds one like it of as many."""
    if isinstance(value, dict):
        of = {key: take_apart(each, parts) for key, each in value.items()}
        return lambda new: {key: build(new) for key, build in of.items()}
    if isinstance(value, slice):
        of_ends = take_apart([value.start, value.stop, value.step], parts)
        return lambda new: slice(*of_ends(new))
    if isinstance(value, tuple | list):
        kind: Any = type(value)
        make, start = getattr(kind, "_make", kind), len(parts)
        builds = [take_apart(each, parts) for each in value]
        if any(isinstance(each, Tensor | NumberOfRows) for each in parts[start:]):
            return lambda new: make([build(new) for build in builds])
        del parts[start:]  # it is one part
    parts.append(value)
    return next


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in what a function gets or returns, in order."""
    parts: list[Any] = []
    if isinstance(value, Tensor):
        return [value]
    take_apart(value, parts)
    return [each for each in parts if isinstance(each, Tensor)]


@dataclass(eq=False)
class Operation:
    """A call of a function that depends on the batch.

    Attributes:
        function: of torch.
        name: of it.
        parts: all that it is given, with gaps for tensors and numbers of rows.
        build: makes its arguments of as many parts.
        modes: in which it runs.
        states: the random states before it, for each chunk; None if it draws nothing.
        outs: the slots of the tensors that it returns; None for an argument.
        likes: their shapes and types, in the first chunk and in the last.
        written: the slots of the arguments it writes into, and of what they are then.
        over: the slots that nothing needs after it.
        uses: the slots of its arguments.
        shared: the places of those that all chunks share.
    """

    function: Callable[..., Any]
    name: str
    parts: list[Any]
    build: Build
    modes: Modes
    states: dict[int, Any] | None = None
    outs: list[int | None] = field(default_factory=list)
    likes: list[tuple[Any, Any]] = field(default_factory=list)
    written: list[tuple[int, int]] = field(default_factory=list)
    over: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        places = enumerate(self.parts)
        self._gaps = [(n, x) for n, x in places if isinstance(x, Gap | NumberOfRows)]
        gaps = [each for _, each in self._gaps if isinstance(each, Gap)]
        self.uses = {each.number for each in gaps if not each.is_shared}
        self.shared = [each.number for each in gaps if each.is_shared]

    def call(self, chunk: Chunk) -> Any:
        """What the function returns for a chunk."""
        parts = list(self.parts)
        for place, gap in self._gaps:
            parts[place] = chunk.fill(gap)
        args, kwargs = self.build(iter(parts))
        return self.function(*args, **kwargs)

    def makes(self) -> set[int]:
        """The slots that it fills."""
        new = {new for _, new in self.written}
        return new.union(slot for slot in self.outs if slot is not None)

    def run(self, chunk: Chunk) -> None:
        """Repeat it for a chunk."""
        found = tensors_in(self.call(chunk))
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
    ) -> None:
        """Run it for a chunk, whose values from before it are there.

        Args:
            number: of the chunk.
            chunk: holds the values, and gets new ones.
            surroundings: sets the modes in which operations run.
            leaves: weight and bias of the meeting, if it runs again for gradients, with
                the draws of the first time.
        """
        again, own = leaves is not None, self.meeting
        for slot in self.copied & self.needed:
            chunk.values[slot] = chunk.values[slot].clone()
        if own is not None:
            surroundings.enter(own.modes)
            with torch.set_grad_enabled(again and own.trains):
                chunk.values[own.y] = own.normalised(chunk.values[own.x], leaves)
        for each in self.operations:
            surroundings.enter(each.modes)
            if each.states is not None and again:
                each.states[number].put_back()
            elif each.states is not None:
                each.states[number] = surroundings.random()
            each.run(chunk)
            for slot in each.over:
                chunk.values.pop(slot, None)


class Store:
    """The values of each chunk, by the numbers of their slots.

    The values of a GPU are kept in pinned memory of the host. Copies run on the stream
    that computes, between its kernels: so they are in order without an event, and torch
    gives pinned memory to another tensor only once the copy has ended. The host does
    not wait.

    Args:
        num_chunks: how many there are.
        device: that computes them.

    Attributes:
        copies: whether what is kept is a copy.
    """

    def __init__(self, num_chunks: int, device: torch.device) -> None:
        self.device, self.copies = device, device.type == "cuda"
        self._kept: list[dict[int, Any]] = [{} for _ in range(num_chunks)]
        self._places: dict[int, int] = {}

    def _to_host(self, tensor: Tensor) -> Any:
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return host.copy_(tensor.detach(), non_blocking=True), tensor.device

    def _from_host(self, kept: Any) -> Tensor:
        host, device = kept
        return host.to(device, non_blocking=True)

    def has(self, chunk: int, slot: int) -> bool:
        return slot in self._kept[chunk]

    def put(self, chunk: int, slot: int, tensor: Tensor) -> None:
        kept = self._to_host(tensor) if self.copies else tensor.detach()
        self._kept[chunk][slot] = kept
        if chunk == 0:
            self._places[slot] = _place(tensor)

    def in_memory_of(self, tensor: Tensor) -> list[int]:
        """The slots whose values were, or are, in the memory of a tensor."""
        place = _place(tensor)
        return [s for s, each in self._places.items() if each == place and place]

    def get(self, chunk: int, slot: int) -> Tensor:
        kept = self._kept[chunk][slot]
        return self._from_host(kept) if self.copies else kept

    def pop(self, chunk: int, slot: int) -> Tensor:
        found = self.get(chunk, slot)
        del self._kept[chunk][slot]
        return found

    def add(self, chunk: int, slot: int, tensor: Tensor) -> None:
        """Add to a value, or put it."""
        if self.has(chunk, slot):
            tensor = self.pop(chunk, slot) + tensor
        self.put(chunk, slot, tensor)

    def drop(self, slots: Iterable[int]) -> None:
        """Keep these no longer, for any chunk."""
        for slot in slots:
            for kept in self._kept:
                kept.pop(slot, None)

    def slots(self) -> set[int]:
        return set().union(*self._kept)


def _place(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except NotImplementedError:  # within a transform of torch.func
        return 0


def is_in_memory_of(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors share memory, so that one is written into with the other."""
    return tensor.device == other.device and bool(
        _place(tensor) and _place(tensor) == _place(other)
    )
