"""The search for a size, on machines whose speed and memory are known."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from trainkit.core.split.size_search import SizeSearch

WHOLE = 4096


class Machine:
    """What a token costs, by the size of a micro-batch, and what memory holds."""

    def __init__(self, cost: Callable[[int], float], memory: int = 10**9) -> None:
        self.cost, self.memory = cost, memory
        self.sizes: list[int] = []

    def window(self, found: SizeSearch, whole: int = WHOLE) -> None:
        while (size := min(found.begin(whole), whole)) > self.memory:
            found.failed(size)
        self.sizes.append(size)
        found.passed(whole, self.cost(size))

    def run(self, found: SizeSearch, most: int = 40) -> Any:
        """Let it search; the size that it has found."""
        for _ in range(most):
            self.window(found)
        assert not found.is_searching
        return found.limit


def up_to(size: int, noise: float = 0.0) -> Callable[[int], float]:
    """Windows get faster up to a size."""
    draw = random.Random(0)
    return lambda now: max(1.0, size / now) * (1 + draw.random() * noise)


def settling() -> Callable[[int], float]:
    """At each size two windows are slow: kernels settle, and something disturbs."""
    seen: list[int] = []
    return lambda size: 9.0 if seen.append(size) or seen.count(size) < 3 else 1 / size


@pytest.mark.parametrize(
    ("cost", "start", "size"),
    [
        *[
            (up_to(size, noise), None, size)
            for size in (512, 2048)
            for noise in (0, 0.01)
        ],
        (up_to(10**9), None, WHOLE),
        (up_to(10**9), 100, 6400),
        (float, None, WHOLE // 8),
        (settling(), None, WHOLE),
    ],
)
def test_it_doubles_while_that_is_faster(cost: Any, start: Any, size: int) -> None:
    machine = Machine(cost)
    assert machine.run(SizeSearch(start=start)) == size
    assert machine.sizes[0] == (start or WHOLE // 8)
    assert max(machine.sizes) <= 2 * size


@pytest.mark.parametrize("memory", [3000, 700, 60, 1])
def test_where_memory_ends_the_size_fits_and_is_halved(memory: int) -> None:
    machine, found = Machine(up_to(10**9), memory), SizeSearch()
    assert memory / 4 < machine.run(found) <= memory
    machine.memory = max(memory // 5, 1)  # it may end at any time
    assert machine.run(found) <= machine.memory


def test_a_first_batch_of_one_short_row_does_not_hold_the_size_down_for_ever() -> None:
    machine, found = Machine(up_to(10**9)), SizeSearch()
    for _ in range(20):
        machine.window(found, whole=8)
    assert not found.is_searching
    assert machine.run(found) >= WHOLE


def test_a_size_is_kept_once_it_is_found() -> None:
    found, machine = SizeSearch(), Machine(up_to(1024))
    machine.window(found)
    again = SizeSearch(found=found.state_dict())
    assert again.limit is None  # a search under way begins anew
    machine.run(found)
    again = SizeSearch(found=found.state_dict())
    assert (again.limit, again.is_searching) == (1024, False)
    found.failed(512)
    again = SizeSearch(found=found.state_dict())
    machine.window(again, whole=9 * WHOLE)  # where memory has ended, it ends
    assert (again.limit, again.is_searching) == (256, False)
