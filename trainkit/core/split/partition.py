"""Which rows share a micro-batch: the cut of least cost.

Rows sorted by length, longest first, are cut into runs. A run of r rows whose longest
is l costs

    r * l + overhead

and is allowed while r <= size and r * l <= tokens; a row by itself always is. The least
sum is found by dynamic programming over the place of the last cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np

Run = tuple[int, int]
Span = tuple[int, int]

OVERHEADS = (0.25, 0.5, 1.0)
"""Overheads as shares of the budget: the first that gives few enough is used.

Measured on windows of 64 (log-normal, uniform and cubed-uniform lengths, 4,096 tokens):
a quarter wastes the least padding but can give two or three micro-batches more than
its tokens fill; above the whole budget nothing changes any more."""


def cut_lengths(
    lengths: Sequence[int],
    *,
    size: int | None = None,
    tokens: int | None = None,
    overhead: float,
) -> list[Run]:
    """Cut sorted rows into the runs of least cost.

    Each further row adds one amount to a run, since its longest row is its first. So
    what all rows before a cut cost is a line for each place where the last run begins;
    the lowest of those that reach the cut is taken.

    >>> cut_lengths([9, 9, 2, 2, 2], tokens=18, overhead=1)
    [(0, 2), (2, 5)]

    Args:
        lengths: of the rows, longest first.
        size: the most rows in a run.
        tokens: the most tokens in it.
        overhead: the cost of a run by itself, in tokens.
    """
    num_rows, first, least, begin = len(lengths), 0, 0.0, [0]
    slopes = np.array(lengths, dtype=float)
    fixed = np.empty(num_rows)  # a line's value at row 0
    ends, most = list[int](), size or num_rows
    for start, length in enumerate(lengths):
        fit = most if tokens is None else min(most, tokens // length)
        ends.append(start + max(1, fit))  # a row that exceeds the budget is alone
    for start in range(num_rows):
        stop = start + 1
        fixed[start] = least + overhead - start * slopes[start]
        while ends[first] < stop:  # a later run ends later
            first += 1
        values = fixed[first:stop] + stop * slopes[first:stop]
        lowest = int(values.argmin())
        least = float(values[lowest])
        begin.append(first + lowest)
    runs, stop = [], num_rows
    while stop:
        runs.append((begin[stop], stop))
        stop = begin[stop]
    return runs[::-1]


def partition(
    groups: Sequence[Sequence[Span]],
    *,
    size: int | None = None,
    tokens: int | None = None,
) -> list[list[int]]:
    """The rows of each micro-batch, for rows with lengths.

    With `tokens`, the cut has the least cost. With `size` alone, it has as few
    micro-batches as possible, and then the least cost. With neither, there is one
    micro-batch. Rows that have several lengths, as of an encoder and a decoder, are cut
    by their sum; where that exceeds the budget, in the same order, each up to it.

    >>> partition([[(0, 2), (0, 9), (0, 2), (0, 9)]], tokens=18)
    [[1, 3], [0, 2]]

    Args:
        groups: for each ragged group the columns of each row: its first one, and the
            one behind its last.
        size: the most rows in a micro-batch.
        tokens: the most tokens in it, over all groups.
    """
    lengths = [
        [stop - start for start, stop in row] for row in zip(*groups, strict=True)
    ]
    keys = [(sum(each), each) for each in lengths]
    order = sorted(range(len(keys)), key=keys.__getitem__, reverse=True)
    totals = [keys[row][0] for row in order]
    if tokens is None:
        # Higher than any cost of padding, so that the number of runs decides first.
        overheads = [1 + len(order) * max(totals, default=0)]
    else:
        overheads = [share * tokens for share in OVERHEADS]
    runs: list[Run] = []
    for each in overheads:
        runs = cut_lengths(totals, size=size, tokens=tokens, overhead=each)
        padded = sum([(stop - start) * totals[start] for start, stop in runs])
        if tokens is None or len(runs) <= 1 + math.ceil(padded / tokens):
            break
    parts = [order[start:stop] for start, stop in runs]
    if tokens is None:
        return parts

    def fits(part: list[int]) -> bool:
        is_within = len(part) * width(groups, part) <= tokens
        return is_within and len(part) <= (size or len(part))

    are_within = all(len(part) == 1 or fits(part) for part in parts)
    return parts if are_within else filled_up(order, fits)


def filled_up(
    order: Sequence[int], fits: Callable[[list[int]], bool]
) -> list[list[int]]:
    """Rows in their order: one that does not fit in the last part begins another.

    >>> filled_up([4, 3, 2, 1], lambda part: sum(part) <= 7)
    [[4, 3], [2, 1]]
    """
    parts: list[list[int]] = []
    for row in order:
        if parts and fits([*parts[-1], row]):
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def even_runs(num_rows: int, num_runs: int) -> list[Run]:
    """Cut rows in their order into runs whose sizes differ by at most one.

    >>> even_runs(10, 3)
    [(0, 4), (4, 7), (7, 10)]
    """
    size, larger = divmod(num_rows, num_runs)
    sizes = [size + 1] * larger + [size] * (num_runs - larger)
    return list(pairwise(accumulate(sizes, initial=0)))


def width(groups: Sequence[Sequence[Span]], rows: Sequence[int]) -> int:
    """How many columns some rows cover together, over all groups.

    >>> width([[(0, 3), (2, 4)], [(0, 7), (0, 1)]], [0, 1])
    11
    """
    return sum([stop - start for start, stop in columns_of(groups, rows)])


def columns_of(groups: Sequence[Sequence[Span]], rows: Sequence[int]) -> list[Span]:
    """The columns that some rows cover together, in each group.

    >>> columns_of([[(0, 3), (2, 4)], [(0, 7), (0, 1)]], [0, 1])
    [(0, 4), (0, 7)]
    """
    starts = [min([group[row][0] for row in rows]) for group in groups]
    stops = [max([group[row][1] for row in rows]) for group in groups]
    return list(zip(starts, stops, strict=True))


def first_fit(
    lengths: Sequence[int], tokens: int, size: int | None = None
) -> list[list[int]]:
    """Documents in as few bins as first fit finds, the longest placed first.

    One that is longer than a bin has a bin of its own.

    >>> first_fit([5, 3, 4, 2], 7)
    [[0, 3], [1, 2]]

    Args:
        lengths: of the documents.
        tokens: the most in a bin.
        size: the most documents in a bin.
    """
    bins, rooms = list[list[int]](), list[int]()
    for place in longest_first(lengths):
        for number, room in enumerate(rooms):
            if room >= lengths[place] and len(bins[number]) != size:
                break
        else:
            number = len(bins)
            bins.append([])
            rooms.append(tokens)
        bins[number].append(place)
        rooms[number] -= lengths[place]
    return [sorted(each) for each in bins]


def spread(lengths: Sequence[int], size: int | None) -> list[list[int]]:
    """Documents dealt to as few bins as hold so many each, the longest first, forth
    and back.

    >>> spread([5, 3, 4, 2], 2)
    [[0, 3], [2, 1]]
    """
    order = longest_first(lengths)
    number = -(-len(order) // (size or len(order)))
    turn = 2 * number
    return [order[n::turn] + order[turn - 1 - n :: turn] for n in range(number)]


def longest_first(lengths: Sequence[int]) -> list[int]:
    """The places of these lengths, in the order of the lengths."""
    return sorted(range(len(lengths)), key=lambda place: -lengths[place])
