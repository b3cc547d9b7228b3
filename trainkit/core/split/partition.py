"""Which rows share a micro-batch: the partition of least cost.

Rows sorted by length, longest first, are cut into runs. A run of r rows whose longest
is l costs

    r * (l + attention * l**2) + overhead

and is allowed while r <= size and r * l <= tokens; a row by itself always is. The least
sum is found by dynamic programming over the place of the last cut. It is exact, as a
comparison with all cuts of small windows shows, except for very many rows in several
groups. Everything here is plain arithmetic on Python's numbers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

Run = tuple[int, int]
Span = tuple[int, int]

OVERHEADS = (0.25, 0.5, 1.0)
"""Default overheads as shares of the budget: the first that gives few enough is used.

Measured on windows of 64 (log-normal, uniform and cubed-uniform lengths, 4,096 tokens):
a quarter wastes the least padding but can give two or three micro-batches more than
its tokens fill; above the whole budget nothing changes any more."""


EXACT_ROWS = 500
"""Up to this many rows in several groups, every place is tried for a cut."""

PIECES = 16
"""With more rows, a run at its limit has about twice as many places to be cut."""


class Line(NamedTuple):
    """The cost of all rows before the next cut, if the last run begins at `start`.

    It is a line because each further row adds one amount: the run's longest row is its
    first.
    """

    start: int
    end: int  # the farthest place where the run may end
    fixed: float  # its value at row 0
    slope: float

    def takeover(self, later: Line) -> float:
        """The first stop at which a later line is not above this one."""
        if later.fixed <= self.fixed:
            return later.start + 1
        if later.slope == self.slope:
            return self.end + 1
        crossing = (later.fixed - self.fixed) / (self.slope - later.slope)
        return min(math.ceil(crossing), self.end + 1)


def cut_lengths(
    lengths: Sequence[int],
    *,
    size: int | None = None,
    tokens: int | None = None,
    overhead: float,
    attention: float = 0.0,
) -> list[Run]:
    """Cut sorted rows into the runs of least cost, in time linear in the rows.

    A later line is less steep and reaches at least as far, so that from some stop on it
    is never again above an earlier one. A queue holds the lines that are the lowest at
    a later stop, in the order of their turns. A line whose turn would end before it
    begins is dropped.

    >>> cut_lengths([9, 9, 2, 2, 2], tokens=18, overhead=1)
    [(0, 2), (2, 5)]

    Args:
        lengths: the rows' lengths, longest first.
        size: the most rows in a run.
        tokens: the most tokens in a run: its rows times the longest.
        overhead: the cost of a run by itself.
        attention: the cost of a row beyond its length, times its length squared.
    """
    num_rows = len(lengths)
    least = 0.0  # of the rows before `start`
    begin = [0]
    lines: deque[Line] = deque()
    turns: deque[float] = deque()  # where each line but the first takes over
    for start, length in enumerate(lengths):
        slope = length + attention * length**2
        end = start + most_rows(length, size, tokens, num_rows)
        line = Line(start, end, least + overhead - start * slope, slope)
        while turns and lines[-1].takeover(line) <= turns[-1]:
            lines.pop()
            turns.pop()
        if lines:
            turns.append(lines[-1].takeover(line))
        lines.append(line)
        stop = start + 1
        while turns and turns[0] <= stop:
            lines.popleft()
            turns.popleft()
        lowest = lines[0]
        least = lowest.fixed + stop * lowest.slope
        begin.append(lowest.start)
    return _runs(begin)


def cut_spans(
    groups: Sequence[Sequence[Span]],
    *,
    size: int | None = None,
    tokens: int | None = None,
    overhead: float,
    attention: float = 0.0,
) -> list[Run]:
    """Cut rows of several ragged groups, or rows padded on either side.

    In each group a row covers a span of columns, and a run covers all columns from the
    first to the last that any of its rows covers. The costs of the groups add up. Each
    place is tried with each place before it, up to `EXACT_ROWS` rows. If there are
    more, neighbours stay together in small pieces, and the cost may be slightly above
    the least.

    >>> cut_spans([[(0, 9), (0, 2)], [(0, 1), (0, 8)]], tokens=36, overhead=1)
    [(0, 1), (1, 2)]

    Args:
        groups: for each ragged group the rows' (first, behind the last) columns, all
            groups in one order of rows.
        size: the most rows in a run.
        tokens: the most tokens in a run, over all groups.
        overhead: the cost of a run by itself.
        attention: the cost of a row beyond its length, times its length squared.
    """
    bounds = _bounds(groups, size, tokens)
    pieces = [
        columns_of(groups, range(start, stop)) for start, stop in pairwise(bounds)
    ]
    best = [0.0]
    begin = [0]
    for stop in range(1, len(bounds)):
        lows = [low for low, _ in pieces[stop - 1]]
        highs = [high for _, high in pieces[stop - 1]]
        least, chosen = math.inf, stop - 1
        for start in range(stop - 1, -1, -1):
            rows = bounds[stop] - bounds[start]
            cost = best[start] + overhead
            padded = 0
            for g, (low, high) in enumerate(pieces[start]):
                lows[g] = low if low < lows[g] else lows[g]
                highs[g] = high if high > highs[g] else highs[g]
                width = highs[g] - lows[g]
                padded += rows * width
                cost += rows * (width + attention * width**2)
            if start < stop - 1 and _exceeds(rows, padded, size, tokens):
                break  # a longer run is not allowed either: it only grows
            if cost < least:
                least, chosen = cost, start
        best.append(least)
        begin.append(chosen)
    return [(bounds[start], bounds[stop]) for start, stop in _runs(begin)]


def _bounds(
    groups: Sequence[Sequence[Span]], size: int | None, tokens: int | None
) -> list[int]:
    """The places where a run may begin or end: all of them, if rows are few.

    Of many rows, neighbours stay together up to a small part of a full run. Multiples
    of `size` are always places, so that the number of runs does not grow.
    """
    num_rows = len(groups[0])
    if num_rows <= EXACT_ROWS or (size is None and tokens is None):
        return list(range(num_rows + 1))
    most = max(1, size // PIECES) if size else num_rows
    share = tokens / PIECES if tokens else None
    bounds, covered = [0], columns_of(groups, [0])
    for row in range(1, num_rows):
        spans = [group[row] for group in groups]
        wider = [
            (min(low, first), max(high, behind))
            for (low, high), (first, behind) in zip(covered, spans, strict=True)
        ]
        rows = row - bounds[-1] + 1
        padded = rows * sum(high - low for low, high in wider)
        at_size = bool(size) and row % size == 0
        if at_size or _exceeds(rows, padded, most, share):
            bounds.append(row)
            wider = spans
        covered = wider
    return [*bounds, num_rows]


def _exceeds(rows: int, padded: int, size: int | None, tokens: float | None) -> bool:
    return bool((tokens and padded > tokens) or (size and rows > size))


def partition(
    groups: Sequence[Sequence[Span]],
    *,
    size: int | None = None,
    tokens: int | None = None,
    overhead: float | None = None,
    attention: float = 0.0,
) -> list[list[int]]:
    """The rows of each micro-batch, for rows with lengths.

    With `tokens`, the cut has the least cost. With `size` alone, it has as few
    micro-batches as possible, and then the least cost. With neither, there is one
    micro-batch. Rows are sorted by their total length over all groups.

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
        # Higher than any cost of padding, so that the number of runs decides first.
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
    """The runs, by the faster way if there is one group, padded on one side."""
    if len(spans) == 1:
        starts, stops = zip(*spans[0], strict=True)
        if len(set(starts)) == 1 or len(set(stops)) == 1:
            lengths = [stop - start for start, stop in spans[0]]
            return cut_lengths(lengths, **options)  # type: ignore[arg-type]
    return cut_spans(spans, **options)  # type: ignore[arg-type]


def _padded(spans: Sequence[Sequence[Span]], runs: Sequence[Run]) -> int:
    """How many tokens the runs compute."""
    return sum(len(run) * width(spans, run) for run in (range(*each) for each in runs))


def width(groups: Sequence[Sequence[Span]], rows: Sequence[int]) -> int:
    """How many columns some rows cover together, over all groups.

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


def most_rows(length: int, size: int | None, tokens: int | None, most: int) -> int:
    """How many rows of one length a run may have, at least 1."""
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
