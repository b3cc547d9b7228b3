"""Which rows share a micro-batch: the partition of least cost.

Rows sorted by length, longest first, are cut into runs. A run of r rows whose longest
is l costs

    r * (l + attention * l**2) + overhead

and is allowed while r <= size and r * l <= tokens; a row by itself always is. The least
sum is found by dynamic programming over the place of the last cut: exact, as comparison
with all cuts of small windows shows. Pure arithmetic on Python's numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

Run = tuple[int, int]
Span = tuple[int, int]

OVERHEADS = (0.25, 0.5, 1.0)
"""The default overhead as a share of the budget: the first that gives few enough.

Measured on windows of 64 (log-normal, uniform and cubed-uniform lengths, 4,096 tokens):
a quarter wastes the least padding but can give two or three micro-batches more than
its tokens fill; above the whole budget nothing changes any more."""


class Line(NamedTuple):
    """What all rows before the next cut cost if the last run begins at `start`.

    A line, since each further row adds the same: the run's longest row is its first.
    """

    start: int
    end: int  # the run may reach so far
    fixed: float
    slope: float


def cut_lengths(
    lengths: Sequence[int],
    *,
    size: int | None = None,
    tokens: int | None = None,
    overhead: float,
    attention: float = 0.0,
) -> list[Run]:
    """Cut sorted rows into the runs of least cost.

    A line that is above a later one stays above it, for it is the steeper one, and the
    later one reaches further: so it is dropped, which leaves few lines to compare.

    >>> cut_lengths([9, 9, 2, 2, 2], tokens=18, overhead=1)
    [(0, 2), (2, 5)]

    Args:
        lengths: the rows' lengths, longest first.
        size: at most so many rows in a run.
        tokens: at most so many tokens in a run, rows times its longest.
        overhead: what a run costs by itself.
        attention: what a row costs beyond its length, times its length squared.
    """
    best = [0.0]
    begin = [0]
    lines: list[Line] = []
    for stop in range(1, len(lengths) + 1):
        start = stop - 1
        length = lengths[start]
        end = start + _most_rows(length, size, tokens, len(lengths))
        slope = length + attention * length**2
        lines.append(Line(start, end, best[start] + overhead, slope))
        least, kept = math.inf, []
        for line in reversed(lines):
            start, end, fixed, slope = line
            if end < stop:
                break  # so do all before it
            cost = fixed + (stop - start) * slope
            if cost < least:
                least = cost
                kept.append(line)
        lines = kept[::-1]
        best.append(least)
        begin.append(lines[0].start)
    return _runs(begin)


def cut_spans(
    groups: Sequence[Sequence[Span]],
    *,
    size: int | None = None,
    tokens: int | None = None,
    overhead: float,
    attention: float = 0.0,
) -> list[Run]:
    """The same for several ragged groups, or rows padded on either side.

    In each group a row covers a span of columns, and a run as many as from the first
    column to the last that any of its rows covers; what the groups cost adds up.

    >>> cut_spans([[(0, 9), (0, 2)], [(0, 1), (0, 8)]], tokens=36, overhead=1)
    [(0, 1), (1, 2)]

    Args:
        groups: for each ragged group the rows' (first, behind the last) columns, all
            groups in one order of rows.
        size: at most so many rows in a run.
        tokens: at most so many tokens in a run, over all groups.
        overhead: what a run costs by itself.
        attention: what a row costs beyond its length, times its length squared.
    """
    best = [0.0]
    begin = [0]
    for stop in range(1, len(groups[0]) + 1):
        lows = [group[stop - 1][0] for group in groups]
        highs = [group[stop - 1][1] for group in groups]
        least, chosen = math.inf, stop - 1
        for start in range(stop - 1, -1, -1):
            rows = stop - start
            cost = best[start] + overhead
            padded = 0
            for g, group in enumerate(groups):
                low, high = group[start]
                lows[g] = low if low < lows[g] else lows[g]
                highs[g] = high if high > highs[g] else highs[g]
                width = highs[g] - lows[g]
                padded += rows * width
                cost += rows * (width + attention * width**2)
            if rows > 1 and ((tokens and padded > tokens) or (size and rows > size)):
                break  # a longer run is not allowed either: it only grows
            if cost < least:
                least, chosen = cost, start
        best.append(least)
        begin.append(chosen)
    return _runs(begin)


def partition(
    groups: Sequence[Sequence[Span]],
    *,
    size: int | None = None,
    tokens: int | None = None,
    overhead: float | None = None,
    attention: float = 0.0,
) -> list[list[int]]:
    """Which rows share a micro-batch, for rows with lengths.

    With `tokens`, the cut of least cost; with `size` alone, the one of least cost among
    those of as few micro-batches as it allows; with neither, one micro-batch. Rows are
    sorted by what they have in all groups together.

    >>> partition([[(0, 2), (0, 9), (0, 2), (0, 9)]], tokens=18)
    [[1, 3], [0, 2]]
    """
    if size is None and tokens is None:
        return [list(range(len(groups[0])))]
    rows = zip(*groups, strict=True)
    totals = [sum(stop - start for start, stop in row) for row in rows]
    order = sorted(range(len(totals)), key=lambda row: -totals[row])
    spans = [[group[row] for row in order] for group in groups]
    if tokens is None:
        # More than any padding can cost: the number decides first.
        widest = [max(stop for _, stop in group) for group in groups]
        number_first = 1 + len(order) * sum(w + attention * w**2 for w in widest)
        tried = [number_first]
    else:
        tried = [overhead] if overhead else [share * tokens for share in OVERHEADS]
    runs: list[Run] = []
    for each in tried:
        runs = _cut(spans, size=size, tokens=tokens, overhead=each, attention=attention)
        if tokens is None or len(runs) <= 1 + math.ceil(_padded(spans, runs) / tokens):
            break
    return [order[start:stop] for start, stop in runs]


def even_runs(num_rows: int, num_runs: int) -> list[Run]:
    """Cut rows in their order into runs whose sizes differ by at most one.

    >>> even_runs(10, 3)
    [(0, 4), (4, 7), (7, 10)]
    """
    size, larger = divmod(num_rows, num_runs)
    ends = [(i + 1) * size + min(i + 1, larger) for i in range(num_runs)]
    return list(zip([0, *ends], ends, strict=False))


def _cut(spans: Sequence[Sequence[Span]], **options: float | None) -> list[Run]:
    """The faster way where there is one group, and it is padded on one side."""
    if len(spans) == 1:
        starts, stops = zip(*spans[0], strict=True)
        if len(set(starts)) == 1 or len(set(stops)) == 1:
            lengths = [stop - start for start, stop in spans[0]]
            return cut_lengths(lengths, **options)  # type: ignore[arg-type]
    return cut_spans(spans, **options)  # type: ignore[arg-type]


def _padded(spans: Sequence[Sequence[Span]], runs: Sequence[Run]) -> int:
    """The tokens that the runs compute."""
    return sum(len(run) * width(spans, run) for run in (range(*each) for each in runs))


def width(groups: Sequence[Sequence[Span]], rows: Sequence[int]) -> int:
    """The columns that some rows cover together, over all groups.

    >>> width([[(0, 3), (2, 4)], [(0, 7), (0, 1)]], [0, 1])
    11
    """
    return sum(stop - start for start, stop in columns_of(groups, rows))


def columns_of(groups: Sequence[Sequence[Span]], rows: Sequence[int]) -> list[Span]:
    """The columns that some rows cover together, in each group.

    >>> columns_of([[(0, 3), (2, 4)], [(0, 7), (0, 1)]], [0, 1])
    [(0, 4), (0, 7)]
    """
    covered = []
    for group in groups:
        starts, stops = zip(*[group[row] for row in rows], strict=True)
        covered.append((min(starts), max(stops)))
    return covered


def _most_rows(length: int, size: int | None, tokens: int | None, most: int) -> int:
    if size is not None:
        most = min(most, size)
    if tokens is not None:
        most = min(most, tokens // length)
    return max(1, most)


def _runs(begin: Sequence[int]) -> list[Run]:
    """Follow the last cuts back to the first row."""
    runs = []
    stop = len(begin) - 1
    while stop:
        runs.append((begin[stop], stop))
        stop = begin[stop]
    return runs[::-1]
