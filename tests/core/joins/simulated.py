"""A simulated GPU: streams that run as late, or in as odd an order, as they may."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

CPU = torch.device("cpu")


@dataclass(eq=False)
class Queue:
    """A stream: its work in order, and how much of it is done."""

    name: str
    is_at_once: bool = False
    work: list[tuple[Point | None, Callable[[], None] | None]] = field(
        default_factory=list
    )
    done: int = 0

    @property
    def is_ready(self) -> bool:
        """Whether its next piece of work may run."""
        if self.done == len(self.work):
            return False
        point, _ = self.work[self.done]
        return point is None or point.is_reached

    def step(self) -> None:
        _, do = self.work[self.done]
        self.done += 1
        if do is not None:
            do()


@dataclass(eq=False)
class Point:
    """An event: a place in a queue."""

    queue: Queue
    number: int

    @property
    def is_reached(self) -> bool:
        return self.queue.done >= self.number


class SimulatedStreams:
    """Stands for `Streams`, with memory of the CPU.

    Streams and events have nothing by which the host could wait for them.

    Memory holds garbage until something is copied there, and again from where the
    stream that owns it has come to the place at which it was freed. A copy into memory
    that has been freed counts as a fault.

    Args:
        seed: of the order in which streams run.
        at_once: whether what computes runs when it is called, as torch does on a CPU;
            copies then run when they are waited for. Else all runs in `finish`.
        ignores: the waits that are not made: the names of who waits, and for whom.
        num_computing: the streams that compute.

    Attributes:
        faults: reads of garbage and writes into freed memory.
        bytes: copied to the host, and back.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        at_once: bool = True,
        ignores: Collection[tuple[str, str]] = (),
        num_computing: int = 1,
    ) -> None:
        self.out, self.back = Queue("out"), Queue("back")
        self.computing = [Queue("main", at_once) for _ in range(num_computing)]
        self.now = self.computing[0]
        self.ignores = ignores
        self.faults = 0
        self.bytes = {"out": 0, "back": 0}
        self._memory: Any = weakref.WeakKeyDictionary()
        self._freed: set[int] = set()
        self._all: list[Tensor] = []
        self._random = random.Random(seed)

    # ---- as Streams ------------------------------------------------------------------

    def current(self) -> Queue:
        return self.now

    def record(self, stream: Queue) -> Point:
        return Point(stream, len(stream.work))

    def wait(self, stream: Queue, event: Point) -> None:
        if (stream.name, event.queue.name) in self.ignores:
            return
        if stream.is_at_once:
            self._reach(event)
        else:
            stream.work.append((event, None))

    def empty_on_host(self, like: Tensor) -> Tensor:
        # With several computing streams torch's allocator takes care of pinned memory.
        return self._empty(like, self.now if len(self.computing) == 1 else None)

    def empty_on_device(self, like: Tensor) -> Tensor:
        return self._empty(like, self.now)

    def copy(self, target: Tensor, source: Tensor, stream: Queue) -> None:
        assert target.stride() == source.stride(), "a copy with temporary memory"
        into, read = self._memory[target.untyped_storage()], self._reader(source)
        self.bytes[stream.name] += source.nbytes

        def copy() -> None:
            self.faults += id(into) in self._freed
            found = read()
            _spoil(into) if found is None else into.copy_(found)

        self._do(stream, copy)

    # ---- what computes ---------------------------------------------------------------

    def new(self, value: float) -> Tensor:
        """A tensor that is filled on the current stream."""
        made = self._empty(torch.empty(4, 2), self.now)
        memory = self._memory[made.untyped_storage()]
        self._do(self.now, lambda: memory.fill_(value))
        return made

    def expect(self, tensor: Tensor, value: float) -> None:
        """Read a tensor on the current stream."""
        memory = self._memory[tensor.untyped_storage()]

        def read() -> None:
            self.faults += bool((memory != value).any())

        self._do(self.now, read)

    def finish(self) -> None:
        """Run all that is left, in an order of the seed's choice."""
        queues = [*self.computing, self.out, self.back]
        self._random.shuffle(queues)
        in_order = self._random.random() < 0.7  # some streams far ahead of others
        while any(each.done < len(each.work) for each in queues):
            ready = [each for each in queues if each.is_ready]
            (ready[0] if in_order else self._random.choice(ready)).step()

    # ---- inside ----------------------------------------------------------------------

    def _reach(self, event: Point) -> None:
        """Run what comes before an event, and nothing else."""
        queue = event.queue
        while not event.is_reached:
            point, _ = queue.work[queue.done]
            if point is not None:
                self._reach(point)
            queue.step()

    def _do(self, stream: Queue, do: Callable[[], None]) -> None:
        if stream.is_at_once:
            do()
        else:
            stream.work.append((None, do))

    def _empty(self, like: Tensor, owner: Queue | None) -> Tensor:
        memory = torch.empty_like(like)
        tensor = torch.from_numpy(memory.numpy())  # with a storage of its own
        storage = tensor.untyped_storage()
        self._memory[storage] = memory

        def end() -> None:
            self._freed.add(id(memory))
            _spoil(memory)

        def freed() -> None:
            if owner is not None:
                self._do(owner, end)

        if owner is not None:
            self._do(owner, lambda: _spoil(memory))
        weakref.finalize(storage, freed).atexit = False
        self._all.append(memory)  # so that ids stay theirs
        return tensor

    def _reader(self, source: Tensor) -> Callable[[], Tensor | None]:
        """What reads a tensor's memory later; it does not keep it."""
        storage = source.untyped_storage()
        if storage in self._memory:
            memory = self._memory[storage]
            return lambda: memory
        known, dtype = weakref.ref(storage), source.dtype
        place = source.storage_offset(), source.shape, source.stride()

        def read() -> Tensor | None:
            there = known()
            empty = torch.empty(0, dtype=dtype)
            return None if there is None else empty.set_(there, *place)

        return read


def _spoil(memory: Tensor) -> None:
    """Fill with garbage."""
    memory.fill_(float("nan") if memory.is_floating_point() else 1)
