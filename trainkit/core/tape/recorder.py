"""Writes down a forward that runs on the first chunk and on the last one at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from trainkit.core.batch_norm.statistics import Meeting, statistics_of, statistics_over
from trainkit.core.inside.moment import versions_of
from trainkit.core.ranks import Ranks, find_ranks
from trainkit.core.tape import functions
from trainkit.core.tape.call import Tape
from trainkit.core.tape.functions import name_of, norm_of, written_by
from trainkit.core.tape.operations import (
    Chunk,
    Gap,
    Operation,
    Segment,
    is_in_memory_of,
    take_apart,
    tensors_in,
)
from trainkit.core.tape.rows import Layout, NumberOfRows
from trainkit.errors import TrainkitError


class Values:
    """The values of the first chunk, and of the last one, which runs beside it.

    Args:
        layout: the chunks.
        shared: the tensors that all chunks share.

    Attributes:
        dims: for each slot the dimension that has the rows, or the name of a function
            that made one value of all rows.
        last: the last chunk; None if there is but one.
    """

    def __init__(self, layout: Layout, shared: list[Tensor]) -> None:
        self._slots: Any = WeakIdKeyDictionary()
        self.dims: dict[int, int | str] = {}
        self.last = Chunk({}, shared, is_small=True) if layout.last else None

    def add(self, first: Tensor, last: Tensor, dim: int | str) -> int:
        """A new slot, for which a tensor stands while Python holds it."""
        slot = len(self.dims)
        self._slots[first], self.dims[slot] = slot, dim
        if self.last is not None:
            values = self.last.values
            for each in values.keys() - {*self._slots.values()}:
                del values[each]
            values[slot] = last
        return slot

    def slot_of(self, value: Any) -> int | None:
        """The slot that a tensor stands for, if it is one of the batch's."""
        return self._slots.get(value) if isinstance(value, Tensor) else None

    def held(self) -> dict[int, Tensor]:
        """The values of the first chunk, by their slots."""
        return {slot: tensor for tensor, slot in self._slots.items()}


class Recorder(TorchFunctionMode):
    """Within it, a forward runs on the first chunk and on the last one at once.

    Each operation that depends on the batch is written down, and the chunks between
    these two repeat it. At each BatchNorm they all meet. What depends on weights alone
    runs once, as Python calls it, and is shared by all chunks.

    Args:
        tape: on which it is written.
        ranks: that share the statistics.

    Attributes:
        values: that Python holds.
        cut: the arguments that have rows.
        is_within: whether a function runs whose own calls are no part of the forward.
    """

    def __init__(self, tape: Tape, ranks: Ranks) -> None:
        super().__init__()
        self._tape, self._ranks = tape, ranks
        self._layout, self._surroundings = tape.layout, tape.surroundings
        self.values = Values(tape.layout, tape.fixed)
        self.cut: list[Tensor] = []
        self._places: dict[int, int] = {}
        self.is_within = False

    def refuse(self, name: str, why: str) -> NoReturn:
        """Refuse a function."""
        raise TrainkitError(
            f"exact BatchNorm: the forward of {self._tape.name} runs once, on the "
            f"first chunk of rows, and the other chunks repeat its operations, so it "
            f"must not use {name} on values of the batch: {why}. Do it outside of the "
            f"module, or give a module within to exact BatchNorm."
        )

    # ---- values ----------------------------------------------------------------------

    def given(self, whole: Tensor) -> Tensor:
        """What the forward gets for an argument: the first chunk, if it has rows."""
        layout = self._layout
        if not whole.ndim or len(whole) != layout.rows:
            return whole
        self.cut.append(whole)
        chunks = [x.detach() for x in whole.detach().split(layout.sizes)]
        first = chunks[0]
        slot = self._add(first, chunks[-1], 0, whole.requires_grad)
        for number, each in enumerate(chunks):
            self._tape.store.put(number, slot, each)
        self._tape.num_arguments = slot + 1
        return first

    def _add(self, first: Tensor, last: Tensor, dim: int | str, trains: bool) -> int:
        """A new slot for a value."""
        slot = self.values.add(first, last, dim)
        if trains and (first.is_floating_point() or first.is_complex()):
            self._tape.trains.add(slot)
        return slot

    def _gap(self, tensor: Tensor) -> Gap:
        slot, tape = self.values.slot_of(tensor), self._tape
        if slot is not None:
            return Gap(slot)
        place = self._places.get(id(tensor))
        if place is None or not is_in_memory_of(tape.fixed[place], tensor):
            place = self._places[id(tensor)] = len(tape.shared)
            tape.shared.append(tensor)  # and so it keeps its id
            tape.fixed.append(tensor.detach())
        return Gap(place, is_shared=True)

    # ---- functions -------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, name_of(func)
        norm = norm_of(func, name, args, kwargs)
        if self.is_within:  # a torch.autograd.Function of the user's own
            if norm is not None:
                self.refuse(name, "no chunk sees the others in an autograd.Function")
            return func(*args, **kwargs)
        parts: list[Any] = []
        build = take_apart((args, kwargs), parts)
        depends = any(self.values.slot_of(each) is not None for each in parts)
        has_rows = any(isinstance(each, NumberOfRows) for each in parts)
        if not depends and not has_rows:
            return func(*args, **kwargs)
        self.is_within = True
        try:
            if norm is not None:
                return self._meet(norm)
            if name == "requires_grad":
                return self.values.slot_of(args[0]) in self._tape.trains
            is_asked = name in functions.ASKED
            why = functions.why_not(func, name, parts, has_rows=has_rows)
            if why and not is_asked:
                self.refuse(name, why)
            if name in functions.LIKE and not has_rows:
                if name.startswith("new_") or self.values.slot_of(args[0]) is None:
                    return func(*args, **kwargs)
            gaps = [self._gap(x) if isinstance(x, Tensor) else x for x in parts]
            again = Operation(func, name, gaps, build, self._surroundings.now())
            found = self._asked if is_asked else self._record
            return found(again, args, kwargs)
        finally:
            self.is_within = False

    def _asked(self, asked: Operation, args: Any, kwargs: Any) -> Any:
        """What Python may know of a value."""
        first = asked.function(*args, **kwargs)
        if self.values.last is None:
            return first
        last = asked.call(self.values.last)
        found = self._layout.both(first, last)
        if found is None:
            now = f"it is {first} for one chunk and {last} for another"
            self.refuse(asked.name, now)
        return found

    # ---- operations ------------------------------------------------------------------

    def _record(self, operation: Operation, args: Any, kwargs: Any) -> Any:
        """Run an operation for the first chunk and the last, and write it down."""
        name, given = operation.name, tensors_in((args, kwargs))
        written = tensors_in(written_by(name, args, kwargs))
        for each in written:
            self._keep_apart(each, name)
        before = versions_of(given)
        found, lasts = self._run_at_once(operation, args, kwargs)
        pairs = zip(before, versions_of(given), strict=True)
        changed = [x for x, (a, b) in zip(given, pairs, strict=True) if a != b]
        results: list[Any] = []
        build = take_apart(found, results)
        tensors = [each for each in results if isinstance(each, Tensor)]
        if not tensors and not changed:
            self.refuse(name, functions.NO_TENSOR)
        lasts = tensors if lasts is None else lasts
        if len(lasts) != len(tensors):
            self.refuse(name, "it returns more tensors for some chunks than for others")
        trains, likes = self._tape.trains_through(operation), operation.likes
        for place, first in enumerate(results):
            if isinstance(first, Tensor):
                last = lasts[len(likes)]
                dim, slot = self._row_dim(first, last, operation), None
                likes.append(((first.shape, first.dtype), (last.shape, last.dtype)))
                if not any(first is each for each in given):
                    # Without the graph of views, which would keep others.
                    results[place] = first = first.detach()
                    slot = self._add(first, last.detach(), dim, trains)
                operation.outs.append(slot)
        for each in changed:
            is_own = self.values.slot_of(each) is not None
            if not is_own or not any(is_in_memory_of(each, x) for x in written):
                self.refuse(name, "it changes a tensor in place that others need")
            self._change(each, operation, trains=trains)
        self._tape.segments[-1].operations.append(operation)
        return build(iter(results))

    def _run_at_once(self, operation: Operation, args: Any, kwargs: Any) -> Any:
        """What it returns for the first chunk, and the tensors that it returns for the
        last, if that is another. If it draws, the random states before are kept."""
        surroundings, last = self._surroundings, self.values.last
        with torch.no_grad(), surroundings.kept():
            before = surroundings.random()
            found = operation.function(*args, **kwargs)
            after = surroundings.random()
            if not before.are(after):
                operation.states = {0: before, self._layout.last: after}
            return found, None if last is None else tensors_in(operation.call(last))

    def _row_dim(self, first: Tensor, last: Tensor, operation: Operation) -> int | str:
        """The dimension of a result that has the rows; the function's name if none
        has."""
        if self.values.last is None:
            return 0
        dims = self._layout.row_dims(first.shape, last.shape)
        if dims is None or len(dims) > 1:
            few, many = self._layout.sizes[-1], self._layout.sizes[0]
            self.refuse(
                operation.name,
                f"it returns {list(first.shape)} for {many} rows, {list(last.shape)} "
                f"for {few} rows, so rows see each other, or their places count",
            )
        of, own = self.values.dims, operation.name
        for maker in (of[slot] for slot in operation.uses if dims):
            if isinstance(maker, str):
                why = f"it makes one value of all rows, which {own} gives to each row"
                self.refuse(maker, why)
        return dims[0] if dims else own

    # ---- writing in place ------------------------------------------------------------

    def _keep_apart(self, tensor: Tensor, name: str) -> None:
        """Copy what is kept of earlier segments in a tensor's memory, before it is
        written into."""
        store, last = self._tape.store, self._layout.last
        if self.values.slot_of(tensor) is None:
            self.refuse(name, "it writes values of a chunk into a tensor of all chunks")
        for each in store.in_memory_of(tensor):
            if each < self._tape.num_arguments:
                self.refuse(name, "it writes into an argument, which others may need")
            self._tape.segments[-1].copied.add(each)
            if not store.copies:
                for number in {0, last}:
                    store.put(number, each, store.get(number, each).clone())

    def _change(self, tensor: Tensor, operation: Operation, *, trains: bool) -> None:
        """Note that a value is another one from here on."""
        old, store, tape = self.values.slot_of(tensor), self._tape.store, self._tape
        assert old is not None
        for slot, other in self.values.held().items():
            is_view = other is not tensor and is_in_memory_of(other, tensor)
            if is_view and (store.has(0, old) or store.has(0, slot)):
                why = "what it writes into has a view from before a BatchNorm"
                self.refuse(operation.name, f"{why}. Use clone()")
        beside = self.values.last
        last = tensor if beside is None else beside.values.pop(old)
        dim = self._row_dim(tensor, last, operation)
        new = self._add(tensor, last, dim, trains or old in tape.trains)
        operation.written.append((old, new))

    # ---- meetings --------------------------------------------------------------------

    def _meet(self, norm: Any) -> Tensor:
        """Normalise a value by the statistics of all rows."""
        slot, tape = self.values.slot_of(norm.input), self._tape
        running = [x for x in (norm.running_mean, norm.running_var) if x is not None]
        weights = [norm.weight, norm.bias]
        if (
            slot is None
            or isinstance(self.values.dims[slot], str)
            or self.values.dims[slot] == 1
        ):
            self.refuse("batch_norm", "what it normalises has no rows, or channels")
        if any(self.values.slot_of(each) is not None for each in (*weights, *running)):
            self.refuse("batch_norm", "its weights depend on the batch")
        places = [None if x is None else self._gap(x).number for x in weights]
        trains = torch.is_grad_enabled() and (
            slot in tape.trains
            or any(x is not None and x.requires_grad for x in weights)
        )
        modes = self._surroundings.now()
        ranks = (
            self._ranks if norm.group is None else find_ranks(None, "none", norm.group)
        )
        with torch.no_grad(), self._surroundings.kept():
            found = statistics_over(*self._close_at(slot), ranks)
            meeting = Meeting(slot, places, modes, trains, *found, norm.eps, ranks)
            meeting.take(*weights)
            if running:
                meeting.move(running, norm.momentum)
            first = last = meeting.normalised(norm.input)
            if self.values.last is not None:
                last = meeting.normalised(self.values.last.values[slot])
        meeting.y = self._add(first, last, self.values.dims[slot], trains)
        tape.segments.append(Segment(meeting))
        return first

    def _close_at(self, x: int) -> tuple[list[Tensor], int]:
        """End a segment at what a BatchNorm gets: what its statistics are made of."""
        store, parts, entries = self._tape.store, [], 0
        wanted = {*self.values.held(), x}
        for number, values in self._close(wanted):
            for slot in wanted:
                if not store.has(number, slot):
                    store.put(number, slot, values[slot])
            given = values[x] if x in values else store.get(number, x)
            entries += given.numel() // max(given.shape[1], 1)
            parts.append(statistics_of(given))
        return parts, entries

    def _close(self, wanted: set[int]) -> Iterator[tuple[int, dict[int, Tensor]]]:
        """End a segment; the values of each chunk in turn, which it made.

        Args:
            wanted: the slots that are needed of it.
        """
        tape, sizes = self._tape, self._layout.sizes
        segment = tape.segments[-1]
        segment.prune(wanted)
        for number in range(len(sizes)):
            if number == 0:
                values = self.values.held()
            elif number == self._layout.last and self.values.last is not None:
                values = self.values.last.values
            else:
                values = {s: tape.store.get(number, s) for s in segment.needed}
                is_small = self._layout.is_small(number)
                chunk = Chunk(values, tape.fixed, is_small=is_small)
                segment.run(number, chunk, self._surroundings)
            yield number, values
            del values

    # ---- the end ---------------------------------------------------------------------

    def outputs(self) -> list[Tensor]:
        """What the call returns, of all chunks."""
        tape, layout, whole = self._tape, self._layout, dict[int, Tensor]()
        with self._surroundings.kept():
            for number, values in self._close({*tape.outputs}):
                for slot, dim in tape.outputs.items():
                    held = slot in values
                    each = values[slot] if held else tape.store.get(number, slot)
                    if slot not in whole:
                        whole[slot] = layout.room(each, dim)
                    layout.piece(whole[slot], number, dim).copy_(each)
        return [whole[slot] for slot in tape.outputs]
