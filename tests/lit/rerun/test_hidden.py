"""Slots, cells, attributes and defaults of functions, and caches are put back."""

from __future__ import annotations

import functools
import gc
import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from trainkit.lit.rerun.snapshot import Snapshot


class Slots:
    __slots__ = ("empty", "items", "number")

    def __init__(self) -> None:
        self.number, self.items = 0, list[int]()


class Below(Slots):
    """Has slots of a class above, and names of its own."""

    own: Any = 0


class Frozen(Slots):
    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, name):
            raise AttributeError(name)
        super().__setattr__(name, value)


class Calling:
    def __init__(self) -> None:
        self.number, self.act = 0, abs_of

    def __call__(self) -> int:
        self.number += 1
        return self.number


def abs_of(number: int) -> int:
    return abs(number)


def counter() -> Callable[[], Any]:
    number, items = 0, list[int]()

    def count() -> Any:
        nonlocal number
        number += 1
        items.append(number)
        return number, *items

    return count


def late() -> Callable[[], Any]:
    """Of a function whose cell is empty at first."""

    def call() -> Any:
        nonlocal found
        try:
            found += 1
        except NameError:
            found = 1
        return found

    if call is None:
        found = 0
    return call


def attributes() -> Callable[[], Any]:
    def tick() -> Any:
        tick.number = getattr(tick, "number", 0) + 1  # type: ignore[attr-defined]
        return tick.number  # type: ignore[attr-defined]

    return tick


def defaults() -> Callable[[], Any]:
    def tick(own: list[int] = [], *, named: list[int] = []) -> Any:  # noqa: B006
        own.append(1)
        named.append(1)
        return len(own), len(named)

    return tick


def slots(kind: Any, **more: Any) -> Callable[[], Any]:
    made = kind()

    def step(made: Any) -> Any:
        object.__setattr__(made, "number", made.number + 1)
        made.items.append(made.number)
        for name in more:
            object.__setattr__(made, name, getattr(made, name, 0) + 1)
        return made.number, *made.items, *(getattr(made, name) for name in more)

    return functools.partial(step, made)


def wrapped(call: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(call)
    def outer() -> Any:
        return call()

    return outer


MAKERS: dict[str, Callable[[], Callable[[], Any]]] = {
    "slots": lambda: slots(Slots),
    "an empty slot": lambda: slots(Slots, empty=0),
    "slots above": lambda: slots(Below, own=0),
    "frozen slots": lambda: slots(Frozen),
    "a cell": counter,
    "an empty cell": late,
    "a cell of a cell": lambda: wrapped(wrapped(counter())),
    "a partial": lambda: functools.partial(counter()),
    "a method": lambda: Calling().__call__,
    "an object that is called": Calling,
    "attributes": attributes,
    "defaults": defaults,
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("place", ["attribute", "list", "value"])
def test_hidden_state_is_put_back_as_often_as_it_is_asked(
    name: str, place: str
) -> None:
    module: Any = nn.Module()
    call = MAKERS[name]()
    module.held = [call] if place == "list" else call
    kept = Snapshot(call if place == "value" else module)
    first = call()
    for _ in range(2):
        assert call() != first  # the control: without putting back, it has moved
        kept.restore()
        assert call() == first
    kept.restore()
    assert not kept.iterators


def test_circles_end() -> None:
    call: Any = attributes()
    call.own = call
    held = Slots()
    held.items.append(held)  # type: ignore[arg-type]
    call.held = held
    Snapshot(call).restore()
    assert call.own is call
    assert call() == 1


def test_functions_of_a_framework_are_left_alone() -> None:
    call = counter()
    call.__module__ = "torch.nn"
    kept = Snapshot(call)
    first = call()
    kept.restore()
    assert call() != first


CACHES: list[Any] = [
    functools.cache,
    functools.lru_cache(8),
    functools.lru_cache(3),
    functools.lru_cache(0),
]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("later", [1, 2, 3])
@pytest.mark.parametrize("clears", [False, True])
def test_a_cache_is_as_before_or_is_said(
    cache: Any, before: int, later: int, clears: bool
) -> None:
    calls: list[int] = []

    @cache
    def cached(number: int) -> int:
        calls.append(number)
        return -number

    for number in range(before):
        cached(number)
    kept = Snapshot({"cached": [cached]})
    if clears:
        cached.cache_clear()
    for number in range(10, 10 + later):
        cached(number)
    kept.restore()
    kept.restore()
    lost = list(kept.lost)
    calls.clear()
    found = [cached(number) for number in (*range(before), 10)]
    assert found == [-number for number in (*range(before), 10)]
    is_kept = cache is not CACHES[-1]
    is_full = cache is CACHES[2] and before + later > 3
    cannot = is_kept and before > 0 and (clears or is_full)
    assert bool(lost) == cannot
    assert all(name.endswith("cached") for name in lost)
    if not cannot:
        assert calls == ([10] if is_kept else [*range(before), 10])


def test_a_full_cache_that_was_only_read_is_not_said() -> None:
    cached = functools.lru_cache(2)(abs)
    assert [cached(-1), cached(-2)] == [1, 2]
    kept = Snapshot([cached])
    assert cached(-1) == 1
    kept.restore()
    assert not kept.lost


def generated() -> Any:
    yield 1


class Own:
    """An iterator whose attributes say all."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        self.number += 1
        return self.number


class Counting(itertools.count):  # type: ignore[type-arg]
    """What it gives is not in its attributes."""


@pytest.mark.parametrize(
    ("value", "is_one"),
    [
        (iter([1]), True),
        ([generated()], True),
        ({"a": [zip([1], [2], strict=True)]}, True),
        (io.StringIO("a"), True),
        (Counting(), True),
        (Own(), False),
        ([1], False),
        (map, False),
    ],
)
def test_iterators_are_named_by_their_attribute(value: Any, is_one: bool) -> None:
    module: Any = nn.Sequential(nn.Module())
    module[0].held, module[0].other = value, [3]
    module[0].box = box = Slots()
    assert list(Snapshot(module).iterators) == ["0.held"] * is_one
    box.items.append(value)
    del module[0].held
    assert list(Snapshot(module).iterators) == ["0.box"] * is_one


def test_an_iterator_that_is_an_object_is_put_back() -> None:
    own = Own()
    kept = Snapshot([own])
    next(own)
    kept.restore()
    assert next(own) == 1


def test_python_looks_for_garbage_afterwards_as_before() -> None:
    for switch in (gc.disable, gc.enable):
        switch()
        was_enabled = gc.isenabled()
        Snapshot([[]])
        assert gc.isenabled() == was_enabled
