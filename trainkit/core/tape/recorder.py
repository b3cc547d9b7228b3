"""Writes down a forward that runs on the first chunk and on the last one at once."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trainkit.core._compat import version_of
from trainkit.core.ranks import Ranks
from trainkit.core.tape import names
from trainkit.core.tape.names import Norm, may_write, name_of, norm_of
from trainkit.core.tape.parts import (
    Chunk,
    Shared,
    Slot,
    fill,
    gaps_in,
    leaves_in,
    rebuilt,
    tensors_in,
    with_gaps,
)
from trainkit.core.tape.rows import Layout, NumberOfRows
from trainkit.core.tape.segments import Meeting, Operation, Segment
from trainkit.core.tape.settings import Surroundings, are_same
from trainkit.core.tape.statistics import Normal, partial
from trainkit.core.tape.store import Store, is_in_memory_of
from trainkit.errors import TrainkitError


def _within(method: Any) -> Any:
    """Marks a method whose own operations are no part of the forward."""

    @functools.wraps(method)
    def run(self: Recorder, *args: Any) -> Any:
        before, self._is_within = self._is_within, True
        try:
            return method(self, *args)
        finally:
            self._is_within = before

    return run


class Recorder(TorchFunctionMode):
    """Within it, a forward runs on the first chunk and on the last one at once.

    Each operation that depends on the batch is written down, and the chunks between
    these two repeat it. At each BatchNorm they all meet. What depends on weights alone
    runs once, as Python calls it, and is shared by all chunks.

    Args:
        name: of the module that runs.
        layout: the chunks.
        store: keeps the values that cross a meeting.
        surroundings: of the operations.
        ranks: that share the statistics.

    Attributes:
        segments: so far.
        shared: the tensors that all chunks share, and that operations use.
        fixed: the same without their graphs, with the data that they had then.
        trains: the slots of the values to which gradients go.
        row_dims: the dimension that has the rows, for each slot; None for none.
    """

    def __init__(
        self,
        name: str,
        layout: Layout,
        store: Store,
        surroundings: Surroundings,
        ranks: Ranks,
    ) -> None:
        super().__init__()
        self.name, self._layout, self._store = name, layout, store
        self._surroundings, self._ranks = surroundings, ranks
        self.segments: list[Segment] = [Segment()]
        self.shared: list[Tensor] = []
        self.fixed: list[Tensor] = []
        self.trains: set[int] = set()
        self.row_dims: dict[int, int | None] = {}
        self._versions: list[int] = []
        self._places: dict[int, int] = {}
        self._values: dict[int, tuple[Any, int]] = {}  # weak references, slots
        self._last = Chunk({}, self.fixed, is_small=layout.last > 0)
        self._mixed: dict[int, str] = {}
        self._num_slots, self._num_arguments, self._is_within = 0, 0, False

    def refuse(self, name: str, why: str) -> NoReturn:
        """Refuse a function."""
        raise TrainkitError(
            f"exact BatchNorm: the forward of {self.name} runs once, on the first "
            f"chunk of rows, and the other chunks repeat its operations, so it must "
            f"not use {name} on values of the batch: {why}. Do it outside of the "
            f"module, or give a module within to exact BatchNorm."
        )

    # ---- values ----------------------------------------------------------------------

    def add_argument(self, chunks: list[Tensor], *, trains: bool) -> Tensor:
        """Take the chunks of an argument; return what the forward gets for it."""
        first = chunks[0].detach()
        slot = self._new(first, chunks[-1].detach(), 0, trains)
        for number, each in enumerate(chunks):
            self._store.put(number, slot, each)
        self._num_arguments = slot + 1
        return first

    def _new(self, first: Tensor, last: Tensor, dim: int | None, trains: bool) -> int:
        """A slot for a value, which its tensor stands for while Python holds it."""
        slot, place = self._num_slots, id(first)
        self._num_slots += 1
        values, lasts = self._values, self._last.values

        def over(reference: Any) -> None:
            known, its_slot = values.get(place, (None, slot))
            if known is reference:
                del values[place]
                lasts.pop(its_slot, None)

        values[place] = weakref.ref(first, over), slot
        if self._layout.last:
            lasts[slot] = last
        self.row_dims[slot] = dim
        if trains and (first.is_floating_point() or first.is_complex()):
            self.trains.add(slot)
        return slot

    def slot_of(self, tensor: Any) -> int | None:
        """The slot that a tensor stands for, if it is one of the batch's."""
        reference, slot = self._values.get(id(tensor), (None, None))
        return slot if reference is not None and reference() is tensor else None

    def held(self) -> dict[int, Tensor]:
        """The values that Python holds, by their slots."""
        pairs = [(slot, reference()) for reference, slot in [*self._values.values()]]
        return {slot: tensor for slot, tensor in pairs if tensor is not None}

    def _gap(self, tensor: Tensor) -> Any:
        slot = self.slot_of(tensor)
        if slot is not None:
            return Slot(slot)
        place = self._places.get(id(tensor))
        if (
            place is None
            or self.shared[place] is not tensor
            or not is_in_memory_of(self.fixed[place], tensor)
        ):
            place = self._places[id(tensor)] = len(self.shared)
            self.shared.append(tensor)
            self.fixed.append(tensor.detach())
            self._versions.append(_version(tensor))
        return Shared(place)

    # ---- functions -------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, name_of(func)
        norm = norm_of(func, name, args, kwargs)
        if self._is_within:  # a torch.autograd.Function of the user's own
            if norm is not None:
                self.refuse(name, "no chunk sees the others in an autograd.Function")
            return func(*args, **kwargs)
        depends, has_rows = self._look(args, kwargs)
        if not depends and not has_rows:
            return self._run_shared(func, name, args, kwargs)
        if norm is not None:
            return self.meet(norm, self._ranks)
        if name in names.ASKED:
            return self._asked(func, name, args, kwargs)
        if name in ("requires_grad", "is_leaf", "grad_fn", "__hash__"):
            return self._known(func, name, args[0])
        self._refuse_function(name, args, kwargs, has_rows=has_rows)
        if name in names.LIKE and not has_rows:
            if name.startswith("new_") or self.slot_of(args[0]) is None:
                return _within(Recorder._run_shared)(self, func, name, args, kwargs)
        return self.record(func, name, args, kwargs)

    def sees(self, args: Any, kwargs: Any) -> bool:
        """Whether a call within the forward depends on the batch."""
        return not self._is_within and self._look(args, kwargs)[0]

    def _look(self, args: Any, kwargs: Any) -> tuple[bool, bool]:
        """Whether arguments hold values of the batch, and numbers of rows."""
        each = [*leaves_in(args), *leaves_in(kwargs)]
        depends = any(self.slot_of(x) is not None for x in each)
        return depends, any(isinstance(x, NumberOfRows) for x in each)

    def _refuse_function(
        self, name: str, args: Any, kwargs: Any, *, has_rows: bool
    ) -> None:
        if name in names.REFUSED:
            self.refuse(name, names.REFUSED[name])
        if has_rows and name not in names.SIZED:
            self.refuse(name, "it gets the number of rows, which is a chunk's")
        if names.is_other_norm(name, args, kwargs):
            self.refuse(
                name,
                "only batch_norm sees all chunks; an InstanceNorm needs "
                "track_running_stats=False",
            )
        if isinstance(kwargs.get("generator"), torch.Generator):
            self.refuse(f"{name}(generator=)", "each chunk would continue its draws")

    def _run_shared(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run what depends on no row, once."""
        if may_write(name, args, kwargs):
            for each in tensors_in([*args, *kwargs.values()]):
                self._freeze(each)
        return func(*args, **kwargs)

    def _freeze(self, tensor: Tensor) -> None:
        """Let operations that were written down use a tensor as it is now, since it
        will be written into."""
        for place, each in enumerate(self.fixed):
            if not is_in_memory_of(each, tensor):
                continue
            if self.shared[place].requires_grad:
                self.refuse("an in-place operation", "it changes a weight in use")
            self._places.pop(id(self.shared[place]), None)
            self.fixed[place] = each.clone()
            self._versions[place] = 0

    def _known(self, func: Any, name: str, tensor: Tensor) -> Any:
        """What is known of a value whose graph is not there yet."""
        trains = self.slot_of(tensor) in self.trains
        answers = {"requires_grad": trains, "is_leaf": not trains, "grad_fn": None}
        return answers[name] if name in answers else func(tensor)

    @_within
    def _asked(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """What Python may know of a value."""
        first = func(*args, **kwargs)
        if not self._layout.last:
            return first
        args, kwargs = fill(with_gaps((args, kwargs), self._gap), self._last)
        last = func(*args, **kwargs)
        found = self._layout.both(first, last)
        if found is None and first != last:
            self.refuse(name, f"it is {first} for one chunk and {last} for another")
        return found

    def refuse_unseen(self, name: str, args: Any) -> None:
        """Refuse an operator that reads a value, and that is no call of a function."""
        if not self._is_within:
            self._refuse_reading(name, args)

    @_within
    def _refuse_reading(self, name: str, args: Any) -> None:
        held = self.held().values()
        for each in tensors_in(args):
            if any(is_in_memory_of(each, value) for value in held):
                self.refuse(name, "a script, a transform or an extension calls it")

    # ---- operations ------------------------------------------------------------------

    @_within
    def record(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run an operation for the first chunk and the last, and write it down."""
        given = tensors_in([*args, *kwargs.values()])
        writes = may_write(name, args, kwargs)
        if writes:
            for each in tensors_in(kwargs.get("out", args[:1])):
                self._keep_apart(each, name)
        gaps = with_gaps((args, kwargs), self._gap)
        before, settings = [*map(_version, given)], self._surroundings.now()
        found, other, states = self._run_twice(func, args, kwargs, gaps)
        tensors, others = tensors_in(found), tensors_in(other)
        changed = [
            each
            for each, version in zip(given, before, strict=True)
            if _version(each) != version
        ]
        if not tensors and not changed:
            self.refuse(name, "it returns no tensor")
        if len(tensors) != len(others):
            self.refuse(name, "it returns more tensors for some chunks than for others")
        operation = Operation(
            func, name, gaps.parts[0], gaps.parts[1], settings, states
        )
        trains = settings[0] and name not in ("detach", "data") and self._goes_on(gaps)
        results = []
        for first, last in zip(tensors, others, strict=True):
            like = (first.shape, first.dtype), (last.shape, last.dtype)
            operation.likes.append(like)
            is_new = not any(first is each for each in given)
            dim = self._row_dim(first, last, operation)
            if is_new:  # without the graph of views, which would keep others
                first, last = first.detach(), last.detach()
            slot = self._new(first, last, dim, trains) if is_new else None
            if slot is not None and dim is None:
                self._mixed[slot] = name
            operation.outs.append(slot)
            results.append(first)
        for each in changed:
            self._change(each, operation, trains=trains, is_expected=writes)
        self.segments[-1].operations.append(operation)
        return rebuilt(found, iter(results))

    def _run_twice(self, func: Any, args: Any, kwargs: Any, gaps: Any) -> Any:
        """What a function returns for the first chunk and for the last, and the random
        states before each, if it draws."""
        last, surroundings = self._layout.last, self._surroundings
        with torch.no_grad(), surroundings.kept():
            before = surroundings.random()
            found = func(*args, **kwargs)
            after = surroundings.random()
            states = None if are_same(before, after) else {0: before, last: after}
            if not last:
                return found, found, states
            args, kwargs = fill(gaps, self._last)
            return found, func(*args, **kwargs), states

    def _goes_on(self, gaps: Any) -> bool:
        """Whether a gradient goes through an operation."""
        return any(
            (isinstance(gap, Slot) and gap.number in self.trains)
            or (isinstance(gap, Shared) and self.shared[gap.number].requires_grad)
            for gap in gaps_in(gaps)
        )

    def _row_dim(self, first: Tensor, last: Tensor, operation: Operation) -> int | None:
        """The dimension of a result that has the rows; None if none has."""
        if not self._layout.last:
            return 0
        dims = self._layout.row_dims(first.shape, last.shape)
        if dims is None or len(dims) > 1:
            few, many = self._layout.sizes[-1], self._layout.sizes[0]
            self.refuse(
                operation.name,
                f"it returns {list(first.shape)} for {many} rows and "
                f"{list(last.shape)} for {few}, so rows see each other, or "
                f"their places count",
            )
        mixed = [self._mixed[slot] for slot in operation.uses if slot in self._mixed]
        if mixed and dims:
            self.refuse(
                mixed[0],
                f"it makes one value of all rows of a chunk, which {operation.name} "
                f"gives to each row",
            )
        return dims[0] if dims else None

    # ---- writing in place ------------------------------------------------------------

    def _keep_apart(self, tensor: Tensor, name: str) -> None:
        """Copy what is kept of earlier segments in a tensor's memory, before it is
        written into."""
        slot, store = self.slot_of(tensor), self._store
        if slot is None:
            self.refuse(name, "it writes values of a chunk into a tensor of all chunks")
        for each in store.in_memory_of(tensor):
            if each < self._num_arguments:
                self.refuse(name, "it writes into an argument, which others may need")
            self.segments[-1].copied.add(each)
            if not store.transport.copies:
                for number in {0, self._layout.last}:
                    store.put(number, each, store.get(number, each).clone())

    def _change(
        self, tensor: Tensor, operation: Operation, *, trains: bool, is_expected: bool
    ) -> None:
        """Note that a value is another one from here on."""
        old, store, name = self.slot_of(tensor), self._store, operation.name
        if old is None or not is_expected:
            self.refuse(name, "it changes a tensor in place that other chunks need")
        for slot, other in self.held().items():
            is_view = other is not tensor and is_in_memory_of(other, tensor)
            if is_view and (store.has(0, old) or store.has(0, slot)):
                self.refuse(
                    name,
                    "it writes into a value that has a view from before a BatchNorm. "
                    "Use clone()",
                )
        last = self._last.values.pop(old, tensor)
        dim = self._row_dim(tensor, last, operation)
        new = self._new(tensor, last, dim, trains or old in self.trains)
        if dim is None:
            self._mixed[new] = name
        operation.written.append((old, new))

    # ---- meetings --------------------------------------------------------------------

    @_within
    def meet(self, norm: Norm, ranks: Ranks) -> Tensor:
        """Normalise a value by the statistics of all rows."""
        slot, last = self.slot_of(norm.x), self._layout.last
        if slot is None or slot in self._mixed or self.row_dims[slot] == 1:
            self.refuse("batch_norm", "what it normalises has no rows, or channels")
        weights, running = norm[3:5], norm[1:3]
        if any(self.slot_of(each) is not None for each in (*weights, *running)):
            self.refuse("batch_norm", "its weights depend on the batch")
        weight, bias = (None if x is None else self._gap(x).number for x in weights)
        trains = torch.is_grad_enabled() and (
            slot in self.trains
            or any(each is not None and each.requires_grad for each in weights)
        )
        settings = self._surroundings.now()
        with torch.no_grad(), self._surroundings.kept():
            parts, entries = self._close_at(slot)
            normal = Normal.of(parts, entries, norm.eps, ranks)
            if norm.running_mean is not None:
                for each in running:
                    self._freeze(each)
                normal.move(running, norm.momentum)
            fixed = normal.weights(*weights)
            first = normal(norm.x, fixed)
            other = normal(self._store.get(last, slot), fixed) if last else first
        new = self._new(first, other, self.row_dims[slot], trains)
        meeting = Meeting(slot, new, weight, bias, normal, settings, trains, fixed)
        self.segments.append(Segment(meeting))
        return first

    def _close_at(self, x: int) -> tuple[list[Tensor], int]:
        """End a segment at what a BatchNorm gets: what its statistics are made of."""
        store, parts, entries = self._store, [], 0
        wanted = {*self.held(), x}
        for number, values in self.close(wanted):
            for slot in wanted:
                if not store.has(number, slot):
                    store.put(number, slot, values[slot])
            given = values[x] if x in values else store.get(number, x)
            entries += given.numel() // max(given.shape[1], 1)
            parts.append(partial(given))
        return parts, entries

    def close(self, wanted: set[int]) -> Iterator[tuple[int, dict[int, Tensor]]]:
        """End a segment; the values of each chunk in turn, which it made.

        Args:
            wanted: the slots that are needed of it.
        """
        for each, version in zip(self.fixed, self._versions, strict=True):
            if _version(each) != version:
                shape = list(each.shape)
                self.refuse(
                    "an in-place operation",
                    f"it changes a tensor of shape {shape} that was used before",
                )
        segment, sizes = self.segments[-1], self._layout.sizes
        segment.prune(wanted)
        for number, rows in enumerate(sizes):
            if number == 0:
                values = self.held()
            elif number == self._layout.last:
                values = self._last.values
            else:
                values = {s: self._store.get(number, s) for s in segment.needed}
                chunk = Chunk(values, self.fixed, is_small=rows < sizes[0])
                segment.run(number, chunk, self._surroundings)
            yield number, values
            del values


def _version(tensor: Tensor) -> int:
    """How often a tensor was changed in place, where torch counts that."""
    return 0 if tensor.is_inference() else version_of(tensor)
