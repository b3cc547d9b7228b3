"""The partition is the one of least cost, and wastes little padding; the search for a
size, on machines whose speed and memory are known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.split.common import DISTRIBUTIONS, window
from trainkit.core.split.partition import (
    Run,
    cut_lengths,
    partition,
    width,
)
from trainkit.core.split.size_search import SizeSearch

LENGTHS = st.lists(st.integers(1, 30) | st.integers(1, 999), min_size=1, max_size=40)
SIZE = st.none() | st.integers(1, 9)
TOKENS = st.none() | st.integers(1, 120) | st.integers(1, 20_000)
OVERHEAD = st.sampled_from([0.5, 1, 3.5, 50, 1000, 10**7])
ATTENTION = st.sampled_from([0.0, 0.01, 0.1, 3.0])


def spans(lengths: Sequence[int]) -> list[tuple[int, int]]:
    return [(0, length) for length in lengths]


def cost(ordered: Sequence[int], run: Run, limits: dict[str, Any]) -> float:
    """What a run costs, written as it is stated; infinite where it is not allowed."""
    rows, longest = run[1] - run[0], ordered[run[0]]
    size, tokens = limits["size"] or math.inf, limits["tokens"] or math.inf
    if rows > 1 and (rows > size or rows * longest > tokens):
        return math.inf
    each = longest + limits["attention"] * longest**2
    return rows * each + limits["overhead"]


def least_cost(ordered: Sequence[int], limits: dict[str, Any]) -> float:
    """The least cost of all cuts: every last run is tried for every row."""
    best = [0.0]
    for stop in range(1, len(ordered) + 1):
        tried = [(start, stop) for start in range(stop)]
        best.append(min(best[run[0]] + cost(ordered, run, limits) for run in tried))
    return best[-1]


@given(LENGTHS, SIZE, TOKENS, OVERHEAD, ATTENTION)
@settings(max_examples=80)
def test_cost_of_the_cut_equals_the_least_of_all_cuts(
    lengths: list[int], size: Any, tokens: Any, overhead: float, attention: float
) -> None:
    ordered = sorted(lengths, reverse=True)
    limits = {"size": size, "tokens": tokens, "attention": attention}
    limits["overhead"] = overhead
    runs = cut_lengths(ordered, **limits)
    assert [row for run in runs for row in range(*run)] == list(range(len(lengths)))
    found = sum(cost(ordered, run, limits) for run in runs)
    assert found == pytest.approx(least_cost(ordered, limits), rel=1e-12)


@given(LENGTHS, st.integers(1, 9), ATTENTION)
@settings(max_examples=40)
def test_size_alone_gives_the_fewest_micro_batches_then_the_least_padding(
    lengths: list[int], size: int, attention: float
) -> None:
    parts = partition([spans(lengths)], size=size, attention=attention)
    assert len(parts) == math.ceil(len(lengths) / size)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    limits = {"size": size, "tokens": None, "attention": attention, "overhead": 1e12}
    each = [sorted((lengths[row] for row in part), reverse=True) for part in parts]
    found = sum(cost(part, (0, len(part)), limits) for part in each)
    least = least_cost(sorted(lengths, reverse=True), limits)
    assert found == pytest.approx(least, rel=1e-14)


@pytest.mark.parametrize(
    ("groups", "options", "parts"),
    [
        ([[3, 50, 3]], {"tokens": 10}, [[1], [0, 2]]),  # over the budget: alone
        ([[3, 50, 3]], {}, [[1, 0, 2]]),
        ([[9, 9, 1, 1], [1, 1, 9, 9]], {"tokens": 20, "overhead": 1}, [[0, 1], [2, 3]]),
    ],
)
def test_rows_of_each_micro_batch(groups: Any, options: Any, parts: Any) -> None:
    assert partition(list(map(spans, groups)), **options) == parts


@pytest.mark.parametrize("limit", [{"tokens": 120}, {"tokens": 120, "size": 3}])
def test_rows_of_two_lengths_stay_within_the_budget(limit: dict[str, int]) -> None:
    draw = random.Random(4)
    groups = [spans([draw.randint(1, 40) for _ in range(60)]) for _ in range(2)]
    parts = partition(groups, **limit)  # type: ignore[arg-type]
    assert sorted(row for part in parts for row in part) == list(range(60))
    padded = [len(part) * width(groups, part) for part in parts]
    for part, wide in zip(parts, padded, strict=True):
        assert len(part) <= limit.get("size", 60)
        assert wide <= 120 or len(part) == 1
    # Negative control: as many in the rows' order pad more.
    size = -(-60 // len(parts))
    in_order = [range(at, min(at + size, 60)) for at in range(0, 60, size)]
    assert sum(len(p) * width(groups, p) for p in in_order) > 1.1 * sum(padded)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_windows_of_64_compute_at_most_1_30_of_their_tokens(name: str) -> None:
    """And none has two micro-batches more than its tokens fill, if a cut has fewer."""
    draw, wasted, in_order, extra = random.Random(0), [], [], []
    for _ in range(30):
        lengths = window(name, draw)

        def padded(parts: Any, lengths: list[int] = lengths) -> int:
            return sum(len(part) * max(lengths[row] for row in part) for part in parts)

        parts = partition([spans(lengths)], tokens=4096)
        wasted.append(padded(parts) / sum(lengths))
        extra.append(len(parts) - math.ceil(padded(parts) / 4096))
        ordered = sorted(lengths, reverse=True)
        fewest = len(cut_lengths(ordered, tokens=4096, overhead=10**9))
        assert extra[-1] <= 1 or len(parts) == fewest
        eights = [range(i, i + 8) for i in range(0, 64, 8)]
        in_order.append(padded(eights) / sum(lengths))
    assert sum(wasted) / 30 <= 1.30
    assert max(wasted) <= 1.5
    assert sum(extra) / 30 <= 1
    # Negative control: micro-batches of 8 in order compute at least 1.4 times more.
    assert sum(in_order) / sum(wasted) >= 1.4


# ---- the search for a size -----------------------------------------------------------

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
