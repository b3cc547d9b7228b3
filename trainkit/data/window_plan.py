"""One plan for the rows of a window over all ranks: which rows share a micro-batch.

A micro-batch of T tokens costs

    T + attention * (the sum of its rows' squared lengths)

Padded rows are sorted by length, the longest first, and cut into as many runs as all
ranks together have micro-batches, so that the dearest run costs least. A greedy pass
says whether a cost is enough, and bisection finds the least. (Padding counts: all rows
of a run have the length of its first.) Rows that are put one behind the other have no
padding; each of them, the dearest first, goes where the cost is least. In both cases
micro-batches of like cost then make a round, one for each rank.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

Rows = list[int]

PRECISION = 1e-3
"""How near the bisection comes to the least cost, as a share of it."""
ROUNDING = 1e-9
"""Of a number of rows, which is a quotient of costs."""


def planned(
    lengths: Sequence[int],
    *,
    num_ranks: int,
    rounds: int,
    tokens: int,
    attention: float = 0.0,
    flattened: bool = False,
) -> list[list[Rows]]:
    """The rows of each micro-batch: in each round, of one micro-batch for each rank.

    >>> planned([9, 2, 8, 2, 2, 3], num_ranks=2, rounds=1, tokens=20)
    [[[0, 2], [5, 1, 3, 4]]]

    Args:
        lengths: of the window's rows, at least one for each micro-batch.
        num_ranks: how many ranks share the window.
        rounds: how many micro-batches each of them makes.
        tokens: the most in a micro-batch, unless so few of them must exceed it.
        attention: the cost of a row beyond its length, times its length squared.
        flattened: whether rows are put one behind the other, without padding.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    sizes = [lengths[row] for row in order]
    costs = [size + attention * size**2 for size in sizes]
    number = num_ranks * rounds
    if flattened:
        parts = _dealt(costs, number)
        if _longest(parts, sizes) > tokens:
            parts = _dealt(sizes, number)
    else:
        parts = _cut(sizes, costs, number, tokens)

    def cost(part: Rows) -> float:
        return sum(costs[n] for n in part) if flattened else len(part) * costs[part[0]]

    parts.sort(key=cost, reverse=True)
    totals = [0.0] * num_ranks
    found = []
    for first in range(0, number, num_ranks):
        # The rank that has computed least so far is given the dearest of the round.
        ranks = sorted(range(num_ranks), key=totals.__getitem__)
        given: list[Rows] = [[] for _ in ranks]
        for rank, part in zip(ranks, parts[first : first + num_ranks], strict=True):
            given[rank] = [order[n] for n in part]
            totals[rank] += cost(part)
        found.append(given)
    return found


def rounds_needed(
    lengths: Sequence[int], *, num_ranks: int, tokens: int, flattened: bool = False
) -> int:
    """How many micro-batches each rank makes, if none may exceed the budget.

    >>> rounds_needed([9, 2, 8, 2, 2, 3], num_ranks=2, tokens=20)
    1
    """
    sizes = sorted(lengths, reverse=True)
    if not flattened:
        runs = _ends(len(sizes), lambda row: max(tokens // sizes[row], 1))
        return -(-len(runs) // num_ranks)
    rounds = -(-sum(sizes) // (tokens * num_ranks))
    while rounds < len(sizes) and (
        _longest(_dealt(sizes, rounds * num_ranks), sizes) > tokens
    ):
        rounds += 1
    return rounds


def _cut(
    sizes: Sequence[int], costs: Sequence[float], number: int, tokens: int
) -> list[Rows]:
    """Sorted rows in so many runs, with the least cost of the dearest."""
    limit = tokens
    if len(_ends(len(sizes), lambda row: max(tokens // sizes[row], 1))) > number:
        limit = sum(sizes)  # so few runs must exceed the budget

    def ends(cost: float) -> list[int]:
        def most(row: int) -> int:
            return min(limit // sizes[row], int(cost / costs[row] + ROUNDING))

        return _ends(len(sizes), most, number)

    too_little, enough = 0.0, costs[0] * len(costs)
    best = ends(enough)
    while enough - too_little > PRECISION * enough:
        middle = (too_little + enough) / 2
        found = ends(middle) if middle >= costs[0] else []
        if found and len(found) <= number:
            best, enough = found, middle
        else:
            too_little = middle
    return [list(range(*each)) for each in zip([0, *best], best, strict=False)]


def _ends(
    num_rows: int, most: Callable[[int], int], number: int | None = None
) -> list[int]:
    """Where runs end that are as long as they may be.

    Args:
        num_rows: how many rows there are.
        most: the most rows in a run that begins with this row.
        number: of runs, if it is known: then each leaves a row for each run to come.
    """
    ends, stop = list[int](), 0
    while stop < num_rows:
        stop = min(stop + most(stop), num_rows)
        if number is not None and len(ends) < number:
            stop = min(stop, num_rows - (number - len(ends) - 1))
        ends.append(stop)
    return ends


def _dealt(costs: Sequence[float], number: int) -> list[Rows]:
    """Sorted rows in so many parts, each row put into the part of least cost."""
    parts: list[Rows] = [[] for _ in range(number)]
    heap = [(0.0, place) for place in range(number)]
    for row, cost in enumerate(costs):
        total, place = heap[0]
        parts[place].append(row)
        heapq.heapreplace(heap, (total + cost, place))
    return parts


def _longest(parts: Sequence[Rows], sizes: Sequence[int]) -> int:
    """The most tokens in a part."""
    return max(sum(sizes[row] for row in part) for part in parts)


def fitted(times: Sequence[Sequence[float]]) -> float:
    """The cost of a squared length as a share of that of a token, at least 0.

    The time of a micro-batch is taken for a sum: so much for each token, and so much
    for the squares of lengths. What it costs by itself counts with its tokens, of which
    all micro-batches have nearly as many. Where the tokens seem to cost nothing,
    nothing can be said, and it is 0.

    Args:
        times: of each micro-batch its tokens, the sum of its squared lengths, seconds.
    """
    table = np.array(times, dtype=float)
    (token, square), *_ = np.linalg.lstsq(table[:, :2], table[:, 2], rcond=None)
    return float(square / token) if token > 0 and square > 0 else 0.0


def now() -> float:
    """The time in seconds at which the device has computed what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # only while times are taken, as the user has asked
    return time.perf_counter()
