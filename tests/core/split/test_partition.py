"""The partition is the one of least cost, and wastes little padding."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.split.common import DISTRIBUTIONS, spans, window
from trainkit.core.split.partition import (
    OVERHEADS,
    Line,
    Run,
    Span,
    cut_lengths,
    even_runs,
    partition,
    width,
)

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=9)
SPANS = st.tuples(st.integers(0, 12), st.integers(1, 12)).map(
    lambda span: (span[0], span[0] + span[1])
)
TOKENS = st.none() | st.integers(1, 120)
SIZE = st.none() | st.integers(1, 9)
OVERHEAD = st.sampled_from([0.5, 1, 10, 50, 1000])
ATTENTION = st.sampled_from([0.0, 0.01, 0.1, 3.0])


def all_cuts(num_rows: int) -> Iterator[list[Run]]:
    """Every way to cut rows in one order into runs."""
    for marks in itertools.product([False, True], repeat=num_rows - 1):
        ends = [i + 1 for i, mark in enumerate(marks) if mark] + [num_rows]
        yield list(zip([0, *ends], ends, strict=False))


def allowed(
    groups: Sequence[Sequence[Span]], run: Run, size: int | None, tokens: int | None
) -> bool:
    rows = range(*run)
    fits_size = size is None or len(rows) <= size
    fits_tokens = tokens is None or len(rows) * width(groups, rows) <= tokens
    return len(rows) == 1 or (fits_size and fits_tokens)


def cost_of(
    groups: Sequence[Sequence[Span]],
    runs: Sequence[Run],
    overhead: float,
    attention: float,
) -> float:
    """The stated cost, written as it is stated."""
    total = 0.0
    for run in runs:
        rows = range(*run)
        for group in groups:
            wide = width([group], rows)
            total += len(rows) * (wide + attention * wide**2)
        total += overhead
    return total


def least_cost(
    groups: Sequence[Sequence[Span]],
    size: int | None,
    tokens: int | None,
    overhead: float,
    attention: float,
) -> float:
    return min(
        cost_of(groups, runs, overhead, attention)
        for runs in all_cuts(len(groups[0]))
        if all(allowed(groups, run, size, tokens) for run in runs)
    )


@given(LENGTHS, SIZE, TOKENS, OVERHEAD, ATTENTION)
@settings(max_examples=80, deadline=None)
def test_cost_of_cut_equals_the_least_of_all_cuts(
    lengths: list[int],
    size: int | None,
    tokens: int | None,
    overhead: float,
    attention: float,
) -> None:
    ordered = sorted(lengths, reverse=True)
    runs = cut_lengths(
        ordered, size=size, tokens=tokens, overhead=overhead, attention=attention
    )
    groups = [spans(ordered)]
    assert all(allowed(groups, run, size, tokens) for run in runs)
    assert [row for run in runs for row in range(*run)] == list(range(len(lengths)))
    least = least_cost(groups, size, tokens, overhead, attention)
    assert cost_of(groups, runs, overhead, attention) == pytest.approx(least)


@given(LENGTHS, st.integers(1, 9), ATTENTION)
@settings(max_examples=100, deadline=None)
def test_size_alone_gives_the_fewest_micro_batches_then_the_least_padding(
    lengths: list[int], size: int, attention: float
) -> None:
    parts = partition([spans(lengths)], size=size, attention=attention)
    assert len(parts) == math.ceil(len(lengths) / size)
    assert max(map(len, parts)) <= size
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    ordered = [spans(sorted(lengths, reverse=True))]
    least = min(
        cost_of(ordered, runs, 0, attention)
        for runs in all_cuts(len(lengths))
        if len(runs) == len(parts)
        and all(allowed(ordered, run, size, None) for run in runs)
    )
    found = sum(
        len(part) * (longest + attention * longest**2)
        for part in parts
        for longest in [max(lengths[row] for row in part)]
    )
    assert found == pytest.approx(least)


def test_row_over_the_budget_is_alone() -> None:
    assert partition([spans([3, 50, 3])], tokens=10) == [[1], [0, 2]]


@pytest.mark.parametrize("limit", [{"tokens": 120}, {"tokens": 120, "size": 3}])
def test_rows_of_two_lengths_stay_within_the_budget(limit: dict[str, int]) -> None:
    """And need no more micro-batches than rows cut in their order, which pad more."""
    draw = random.Random(4)
    encoder = spans([draw.randint(1, 40) for _ in range(60)])
    decoder = spans([draw.randint(1, 40) for _ in range(60)])
    parts = partition([encoder, decoder], **limit)  # type: ignore[arg-type]
    assert sorted(row for part in parts for row in part) == list(range(60))
    for part in parts:
        assert len(part) <= limit.get("size", 60)
        padded = len(part) * width([encoder, decoder], part)
        assert padded <= 120 or len(part) == 1
    size = -(-60 // len(parts))
    in_order = [list(range(at, min(at + size, 60))) for at in range(0, 60, size)]
    computed = [
        sum(len(part) * width([encoder, decoder], part) for part in each)
        for each in (parts, in_order)
    ]
    assert 1.1 * computed[0] < computed[1]


def test_rows_of_both_groups_bind() -> None:
    encoder, decoder = spans([9, 9, 1, 1]), spans([1, 1, 9, 9])
    parts = partition([encoder, decoder], tokens=20, overhead=1)
    assert sorted(map(sorted, parts)) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("num_runs", [1, 3, 4, 10])
def test_even_runs_differ_by_at_most_one(num_runs: int) -> None:
    sizes = [stop - start for start, stop in even_runs(10, num_runs)]
    assert sum(sizes) == 10
    assert max(sizes) - min(sizes) <= 1


# ---- many rows -----------------------------------------------------------------------


def least_by_recurrence(
    lengths: Sequence[int],
    size: int | None,
    tokens: int | None,
    overhead: float,
    attention: float,
) -> float:
    """The least cost, every last run tried for every row: quadratic."""
    best = [0.0]
    for stop in range(1, len(lengths) + 1):
        tried = []
        for start in range(stop):
            rows, longest = stop - start, lengths[start]
            if rows == 1 or (
                (size is None or rows <= size)
                and (tokens is None or rows * longest <= tokens)
            ):
                each = longest + attention * longest**2
                tried.append(best[start] + overhead + rows * each)
        best.append(min(tried))
    return best[-1]


@pytest.mark.parametrize("longest", [3, 40, 1000])
@pytest.mark.parametrize("attention", [0.0, 0.07])
def test_cost_of_many_rows_equals_the_quadratic_recurrence(
    longest: int, attention: float
) -> None:
    draw = random.Random(longest)
    for _ in range(6):
        num_rows = draw.choice([50, 150, 300])
        ordered = sorted(draw.randint(1, longest) for _ in range(num_rows))[::-1]
        size = draw.choice([None, 1, 7, 40])
        tokens = draw.choice([None, longest // 2 + 1, 5 * longest, 60 * longest])
        overhead = draw.choice([1, 3.5, longest, 20 * longest, 10**7])
        runs = cut_lengths(
            ordered, size=size, tokens=tokens, overhead=overhead, attention=attention
        )
        groups = [spans(ordered)]
        assert all(allowed(groups, run, size, tokens) for run in runs)
        assert [row for run in runs for row in range(*run)] == list(range(num_rows))
        least = least_by_recurrence(ordered, size, tokens, overhead, attention)
        found = cost_of(groups, runs, overhead, attention)
        assert found == pytest.approx(least, rel=1e-12)


@pytest.mark.parametrize("tokens", [2_000_000, 30_000])
@pytest.mark.parametrize("longest", [1, 1024])
def test_comparisons_grow_no_faster_than_the_rows(
    tokens: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_compared = 0
    takeover = Line.takeover

    def counted(self: Line, later: Line) -> float:
        nonlocal num_compared
        num_compared += 1
        return takeover(self, later)

    monkeypatch.setattr(Line, "takeover", counted)
    draw = random.Random(0)
    ordered = sorted(draw.randint(1, longest) for _ in range(10_000))[::-1]
    cut_lengths(ordered, tokens=tokens, overhead=tokens / 4)
    assert num_compared <= 3 * 10_000


# ---- how much padding is left --------------------------------------------------------


def padded_of(lengths: Sequence[int], parts: Sequence[Sequence[int]]) -> int:
    return sum(len(part) * max(lengths[row] for row in part) for part in parts)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_windows_of_64_compute_at_most_1_30_of_their_tokens(name: str) -> None:
    draw = random.Random(0)
    wasted, in_order, extra = [], [], []
    for _ in range(100):
        lengths = window(name, draw)
        parts = partition([spans(lengths)], tokens=4096)
        padded = padded_of(lengths, parts)
        wasted.append(padded / sum(lengths))
        extra.append(len(parts) - math.ceil(padded / 4096))
        eights = [list(range(i, i + 8)) for i in range(0, 64, 8)]
        in_order.append(padded_of(lengths, eights) / sum(lengths))
    assert sum(wasted) / 100 <= 1.30
    assert max(wasted) <= 1.5
    assert sum(extra) / 100 <= 1
    assert sum(each > 1 for each in extra) <= 12
    # Negative control: micro-batches of 8 in order compute at least 1.4 times more.
    assert sum(in_order) / sum(wasted) >= 1.4


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_over_one_micro_batch_more_only_where_the_budget_allows_no_fewer(
    name: str,
) -> None:
    draw = random.Random(1)
    for _ in range(50):
        lengths = window(name, draw)
        parts = partition([spans(lengths)], tokens=4096)
        extra = len(parts) - math.ceil(padded_of(lengths, parts) / 4096)
        ordered = sorted(lengths, reverse=True)
        fewest = len(cut_lengths(ordered, tokens=4096, overhead=10**9))
        assert extra <= 1 or len(parts) == fewest


def test_default_overhead_is_one_of_the_shares() -> None:
    draw = random.Random(2)
    for _ in range(20):
        lengths = window("cubed-uniform", draw)
        parts = partition([spans(lengths)], tokens=4096)
        candidates = [
            partition([spans(lengths)], tokens=4096, overhead=share * 4096)
            for share in OVERHEADS
        ]
        assert parts in candidates


def test_smaller_overhead_means_more_micro_batches_and_less_padding() -> None:
    lengths = window("log-normal", random.Random(3))
    few, many = (
        partition([spans(lengths)], tokens=4096, overhead=overhead)
        for overhead in (4096, 1)
    )
    assert len(few) < len(many)
    assert padded_of(lengths, few) > padded_of(lengths, many)
