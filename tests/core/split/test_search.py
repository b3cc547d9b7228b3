"""The search for a size, on machines whose speed and memory are known."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from trainkit.core.split import search
from trainkit.core.split.search import SizeSearch, frontier

LONGEST = 512
SEEDS = range(40)
Curve = Callable[[int], float]


@dataclass
class Machine:
    """What a token costs, by the size of a micro-batch, and what memory holds.

    Some windows take three times as long, all up to a tenth more or less.
    """

    curve: Curve
    seed: int
    memory: int = 10**9
    num_failures: int = 0

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def seconds(self, size: int) -> float:
        slow = 3 if self._draw.random() < 0.05 else 1
        return self.curve(size) * self._draw.gauss(1, 0.1) * slow


def run(machine: Machine, found: SizeSearch, whole: int, most: int = 60) -> int:
    """Let it search; say how many windows that took."""
    for number in range(most):
        if not found.is_searching:
            return number
        step(machine, found, whole)
    return most


def step(machine: Machine, found: SizeSearch, whole: int) -> int:
    """A window; say with which size it was run."""
    found.begin(whole)
    size = current(found, whole)
    while size > machine.memory:
        machine.num_failures += 1
        found.failed(size)
        size = current(found, whole)
    longest = min(LONGEST, size)
    seconds = machine.seconds(size)
    found.passed([(size, longest)], whole=whole, seconds=seconds, real=1)
    return size


def current(found: SizeSearch, whole: int) -> int:
    assert found.limit is not None
    return min(found.limit, whole)


def u_shaped(draw: random.Random) -> Curve:
    best, steep = 2 ** draw.uniform(7, 15), draw.uniform(0.3, 1.5)
    return lambda size: (size / best) ** steep + (best / size) ** steep


def flat(draw: random.Random) -> Curve:
    return lambda size: 1.0


def falling(draw: random.Random) -> Curve:
    steep = draw.uniform(0.1, 1)
    return lambda size: size**-steep


def rising(draw: random.Random) -> Curve:
    steep = draw.uniform(0.1, 1)
    return lambda size: size**steep


def saturating(draw: random.Random) -> Curve:
    overhead = 2 ** draw.uniform(7, 14)
    return lambda size: 1 + overhead / size


CURVES = (u_shaped, flat, falling, rising, saturating)


def ratio(make: Callable[[random.Random], Curve], seed: int) -> tuple[float, int]:
    """How much slower the found size is than the best of all, and the windows."""
    draw = random.Random(f"{make.__name__} {seed}")
    machine, found = Machine(make(draw), seed), SizeSearch()
    whole = draw.choice([8192, 16384, 40000, 65536])
    spent = run(machine, found, whole)
    best = min(map(machine.curve, range(LONGEST, whole + 1, 64)))
    return machine.curve(current(found, whole)) / best, spent


@pytest.mark.parametrize("make", CURVES)
def test_found_size_is_within_a_tenth_of_the_best(
    make: Callable[[random.Random], Curve],
) -> None:
    """One in a hundred or so is unlucky, and not by much."""
    found = [ratio(make, seed) for seed in SEEDS]
    ratios = sorted(slower for slower, _ in found)
    assert ratios[-3] <= 1.10
    assert ratios[-1] <= 1.3
    assert max(spent for _, spent in found) <= 40


def test_a_search_that_stays_at_the_whole_batch_would_be_slower() -> None:
    """The control: the curves are not so flat that anything will do."""
    for make in (u_shaped, rising):
        curves = [make(random.Random(f"{make.__name__} {seed}")) for seed in SEEDS]
        worse = [c(65536) / min(map(c, range(LONGEST, 65537, 64))) for c in curves]
        assert sorted(worse)[len(worse) // 2] > 1.5


@pytest.mark.parametrize("make", CURVES)
@pytest.mark.parametrize("seed", SEEDS[:10])
def test_where_memory_binds_the_size_fits_and_is_within_a_half_of_it(
    make: Callable[[random.Random], Curve], seed: int
) -> None:
    """Sizes go by factors of the square root of two below the first that fits."""
    draw = random.Random(f"{make.__name__} {seed}")
    machine = Machine(make(draw), seed, memory=draw.randint(600, 20000))
    found = SizeSearch()
    assert run(machine, found, 65536) <= 40
    size = current(found, 65536)
    assert size <= machine.memory
    fit = [s for s in (65536 // 2**k for k in range(8)) if s <= machine.memory]
    best = min(machine.curve(s) for s in fit if s >= LONGEST)
    assert machine.curve(size) <= 1.25 * best


@pytest.mark.parametrize("seed", range(50))
def test_memory_may_run_out_at_any_time(seed: int) -> None:
    """Each failure makes the cut finer, whatever the search was about to do."""
    draw = random.Random(seed)
    machine = Machine(u_shaped(draw), seed)
    found = SizeSearch(grow_after=draw.choice([None, 3]))
    for _ in range(150):
        if draw.random() < 0.08:
            machine.memory = draw.randint(1, 65536)
        size = step(machine, found, 65536)
        assert size <= machine.memory
        assert found.limit is not None
        assert found.limit >= 1
    assert machine.num_failures < 150 * 17


@pytest.mark.parametrize("after", range(1, 45))
def test_a_micro_batch_below_all_timed_sizes_may_fail(after: int) -> None:
    """Of long rows a smaller one may need more; the search goes on below it."""
    machine, found = Machine(flat(random.Random(0)), 0), SizeSearch(grow_after=5)
    for _ in range(after):
        step(machine, found, 4096)
    found.failed(300)
    sizes = [step(machine, found, 4096) for _ in range(4)]
    assert max(sizes) < 300


def test_a_failed_size_is_never_tried_again_unless_asked() -> None:
    machine, found = Machine(falling(random.Random(1)), 1, memory=5000), SizeSearch()
    tried = [step(machine, found, 65536) for _ in range(200)]
    assert max(tried) <= 5000
    assert machine.num_failures <= 6


def test_after_a_quiet_spell_a_larger_size_is_tried_again() -> None:
    machine = Machine(falling(random.Random(1)), 1, memory=3000)
    found = SizeSearch(grow_after=20)
    run(machine, found, 16384)
    small = current(found, 16384)
    machine.memory = 10**9
    for _ in range(200):
        step(machine, found, 16384)
    assert small <= 3000
    assert current(found, 16384) > 0.9 * 16384


def test_a_first_batch_of_one_short_row_does_not_hold_the_size_down_for_ever() -> None:
    """Twice as much as it may still be less than a longer row, which is never tried."""
    found = SizeSearch(grow_after=5)
    found.begin(5)
    found.passed([(5, 5)], whole=5, seconds=1, real=5)
    for _ in range(200):
        limit = found.limit or 0
        seconds = 1 + 1000 / limit
        found.passed([(max(limit, 20), 20)], whole=400, seconds=seconds, real=400)
    assert found.limit == 400


def test_start_is_the_first_size_and_the_largest() -> None:
    found = SizeSearch(start=4096)
    machine = Machine(falling(random.Random(1)), 1)
    tried = [step(machine, found, 65536) for _ in range(40)]
    assert tried[0] == max(tried) == 4096


def test_rows_that_have_no_lengths_go_down_to_single_ones() -> None:
    found, tried = SizeSearch(), set()
    for _ in range(40):
        found.begin(64)
        size = current(found, 64)
        tried.add(size)
        found.passed([(size, 1)], whole=64, seconds=float(size), real=1)
    assert min(tried) == found.limit == 1
    assert not found.is_searching


# ---- what has run --------------------------------------------------------------------


def test_a_size_is_proven_by_one_micro_batch_that_is_no_smaller_in_anything() -> None:
    """A wide micro-batch and a long one do not prove one that is both."""
    found = SizeSearch()
    found.begin(100)
    found.passed([(100, 10), (50, 50)], whole=100, seconds=1, real=1)
    assert found.has_proven([(100, 10), (40, 45)])
    assert not found.has_proven([(100, 50)])
    assert not found.has_proven([(100, 10), (101, 1)])
    found.failed(60)
    assert found.has_proven([(50, 50)])
    assert not found.has_proven([(100, 10)])


@pytest.mark.parametrize("seed", range(20))
def test_frontier_covers_all_points_and_none_of_it_another(seed: int) -> None:
    draw = random.Random(seed)
    points = [(draw.randint(1, 9), draw.randint(1, 9)) for _ in range(12)]
    kept = frontier(points)
    for size, longest in points:
        assert any(size <= s and longest <= n for s, n in kept)
    for one in kept:
        others = [other for other in kept if other != one]
        assert not any(one[0] <= s and one[1] <= n for s, n in others)


# ---- checkpoints ---------------------------------------------------------------------


def test_a_found_size_goes_on_and_has_to_run_once_more() -> None:
    """The run may stand on another machine, so nothing is taken as proven."""
    machine, found = Machine(u_shaped(random.Random(2)), 2), SizeSearch()
    run(machine, found, 16384)
    resumed = SizeSearch()
    resumed.load_state_dict(found.state_dict())
    resumed.begin(16384)
    assert resumed.limit == found.limit
    assert not resumed.is_searching
    assert found.has_proven([(512, 512)])
    assert not resumed.has_proven([(512, 512)])


def test_a_search_under_way_begins_anew_below_what_failed() -> None:
    machine, found = Machine(falling(random.Random(3)), 3, memory=5000), SizeSearch()
    for _ in range(4):
        step(machine, found, 16384)
    assert found.is_searching
    resumed = SizeSearch()
    resumed.load_state_dict(found.state_dict())
    resumed.begin(16384)
    assert resumed.is_searching
    assert resumed.limit == 4096


def test_windows_that_a_search_may_take_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search, "MOST", 7)
    assert run(Machine(flat(random.Random(0)), 0), SizeSearch(), 65536) <= 9


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_small_first_batch_is_no_ceiling(has_ended: bool) -> None:
    """Data sorted by length, a curriculum: what the first batch held says little."""
    search = SizeSearch()
    search.begin(10)
    windows = 60 if has_ended else 2
    for _ in range(windows):
        search.passed([(10, 1)], whole=10, seconds=1.0, real=10.0)
    assert search.is_searching is not has_ended
    search.begin(1000)
    search.passed([(10, 1)], whole=1000, seconds=1.0, real=1000.0)
    assert search.is_searching
    assert search.limit == 1000


def test_a_start_that_was_said_stays_the_ceiling() -> None:
    search = SizeSearch(start=10)
    search.begin(1000)
    search.passed([(10, 1)], whole=1000, seconds=1.0, real=1000.0)
    assert search.limit is not None
    assert search.limit <= 10
