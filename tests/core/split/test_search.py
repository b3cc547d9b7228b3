"""The search for a size, on machines whose speed and memory are known."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from trainkit.core.split.search import SizeSearch, frontier

WHOLE = 4096


@dataclass
class Machine:
    """What a token costs, by the size of a micro-batch, and what memory holds."""

    cost: Callable[[int], float]
    memory: int = 10**9
    noise: float = 0.0
    sizes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._draw = random.Random(0)

    def window(self, found: SizeSearch, whole: int = WHOLE) -> None:
        found.begin(whole)
        while (size := min(self.limit_of(found), whole)) > self.memory:
            found.failed(size)
        self.sizes.append(size)
        seconds = self.cost(size) * (1 + self._draw.random() * self.noise)
        found.passed([(size, 9)], whole=whole, seconds=seconds, real=1)

    def run(self, found: SizeSearch, most: int = 40) -> int:
        """Let it search; the size that it has found."""
        for _ in range(most):
            self.window(found)
        assert not found.is_searching
        return self.limit_of(found)

    def limit_of(self, found: SizeSearch) -> int:
        assert found.limit is not None
        return found.limit


def saturates(at: int) -> Callable[[int], float]:
    return lambda size: max(1.0, at / size)


@pytest.mark.parametrize("noise", [0.0, 0.01])
@pytest.mark.parametrize(("at", "size"), [(512, 512), (1024, 1024), (2048, 2048)])
def test_it_doubles_while_that_is_faster(at: int, size: int, noise: float) -> None:
    machine = Machine(saturates(at), noise=noise)
    assert machine.run(SizeSearch()) == size
    assert machine.sizes[0] == WHOLE // 8
    assert max(machine.sizes) <= 2 * size


def test_it_goes_up_to_the_whole_batch_and_back_where_that_is_slower() -> None:
    assert Machine(lambda size: 1 / size).run(SizeSearch()) == WHOLE
    assert Machine(lambda size: float(size)).run(SizeSearch()) == WHOLE // 8
    assert Machine(lambda size: 1 / size).run(SizeSearch(start=100)) >= WHOLE


def test_windows_that_settle_are_not_timed() -> None:
    """The first at each size is slow; timed, it would end the search at once."""
    seen: set[int] = set()

    def cost(size: int) -> float:
        is_first = size not in seen
        seen.add(size)
        return 9.0 if is_first else 1 / size

    assert Machine(cost).run(SizeSearch()) == WHOLE


@pytest.mark.parametrize("memory", [3000, 700, 60, 1])
def test_where_memory_ends_the_size_fits_and_is_halved(memory: int) -> None:
    machine = Machine(lambda size: 1 / size, memory=memory)
    found = machine.run(SizeSearch())
    assert memory / 4 < found <= memory
    machine.memory = found // 3
    if machine.memory:  # it may end at any time
        machine.window(found_later := SizeSearch())
        assert machine.limit_of(found_later) <= machine.memory


def test_a_first_batch_of_one_short_row_does_not_hold_the_size_down_for_ever() -> None:
    machine, found = Machine(lambda size: 1 / size), SizeSearch()
    for _ in range(20):
        machine.window(found, whole=8)
    assert not found.is_searching
    assert machine.run(found) >= WHOLE


def test_a_size_is_proven_by_one_micro_batch_that_is_no_smaller_in_anything() -> None:
    found = SizeSearch()
    found.begin(100)
    found.passed([(100, 10), (80, 40)], whole=100, seconds=1, real=1)
    assert found.has_proven([(100, 10), (80, 40), (70, 30)])
    assert not found.has_proven([(100, 11)])
    assert not found.has_proven([(81, 40)])
    found.failed(90)
    assert not found.has_proven([(1, 1)])  # memory is not as it was


def test_a_found_size_goes_on_and_has_to_run_once_more() -> None:
    found = SizeSearch()
    machine = Machine(saturates(1024))
    machine.run(found)
    again = SizeSearch()
    again.load_state_dict(found.state_dict())
    assert (again.limit, again.is_searching) == (1024, False)
    assert not again.has_proven([(1, 1)])
    machine.window(again)
    assert not again.is_searching


def test_a_search_under_way_begins_anew_below_what_failed() -> None:
    found, again = SizeSearch(), SizeSearch()
    Machine(saturates(9)).window(found)
    again.load_state_dict(found.state_dict())
    assert again.limit is None
    found.failed(512)
    again.load_state_dict(found.state_dict())
    assert again.limit == 256


def test_frontier_covers_all_points_and_none_of_it_another() -> None:
    draw = random.Random(0)
    points = [(draw.randint(1, 99), draw.randint(1, 30)) for _ in range(60)]
    kept = frontier(points)
    assert all(any(s <= a and n <= b for a, b in kept) for s, n in points)
    for one in kept:
        others = [each for each in kept if each != one]
        assert not any(one[0] <= a and one[1] <= b for a, b in others)
