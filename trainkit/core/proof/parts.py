"""Which rows of a batch go into which part, so that denominators can be told apart."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

TRIES = 200
FEW_TRIES = 100
CLEAR = 0.02


def telling_parts(counts: Tensor, num_parts: int, least: int = 2) -> list[list[int]]:
    """Parts of unlike size by which as many denominators as can be are told apart.

    Of random partitions, the one is taken in which the two denominators that are most
    alike differ most.

    >>> [len(part) for part in telling_parts(torch.ones(5, 1), 2)]
    [2, 3]

    Args:
        counts: one row for each row of the batch, one column for each denominator.
        num_parts: how many parts.
        least: the fewest rows in a part.
    """
    num_rows = len(counts)
    num_parts = max(1, min(num_parts, num_rows // least))
    draw = random.Random(0)
    best, found = -1.0, [list(range(num_rows))]
    for _ in range(TRIES if num_parts > 1 else 0):
        parts = _drawn(draw, num_rows, num_parts, least)
        apart = _least_distance(counts, parts)
        if apart > best:
            best, found = apart, parts
    return found


def telling_rows(
    counts: Tensor, sizes: Sequence[int], own: int | None = 0
) -> list[list[int]]:
    """A few rows, in parts of these sizes, that tell one denominator from many others.

    Of random choices, the one is taken in which it differs from the most others.

    >>> telling_rows(torch.tensor([[1, 3], [1, 3], [1, 9]]), [1, 1])
    [[1], [2]]

    Args:
        counts: one row for each row of the batch, one column for each denominator.
        sizes: the number of rows in each part.
        own: the column of the one; None if all parts count alike by it.
    """
    draw = random.Random(0)
    apart = [_choice(draw, counts, sizes, own) for _ in range(FEW_TRIES)]
    return max(apart, key=lambda each: each[0])[1]


def _choice(
    draw: random.Random, counts: Tensor, sizes: Sequence[int], own: int | None
) -> tuple[tuple[int, float], list[list[int]]]:
    """Some rows in parts; how many others they tell it from, and how clearly."""
    order, parts = draw.sample(range(len(counts)), sum(sizes)), []
    for size in sizes:
        parts.append(sorted(order[:size]))
        order = order[size:]
    shares = torch.stack([counts[part].sum(0) for part in parts]).double()
    shares = shares / shares.sum(0).clamp_min(1e-9)
    even = torch.full((len(parts), 1), 1 / len(parts), dtype=torch.float64)
    shares = torch.cat([shares, even], 1)
    distances = (shares - shares[:, [-1 if own is None else own]]).norm(dim=0)
    clear = distances[distances > CLEAR]
    return (len(clear), float(clear.min()) if len(clear) else 0.0), parts


def _drawn(
    draw: random.Random, num_rows: int, num_parts: int, least: int
) -> list[list[int]]:
    order = draw.sample(range(num_rows), num_rows)
    spare = num_rows - least * num_parts
    cuts = sorted(draw.randint(0, spare) for _ in range(num_parts - 1))
    sizes = [b - a + least for a, b in zip([0, *cuts], [*cuts, spare], strict=True)]
    parts, start = [], 0
    for size in sorted(sizes):
        parts.append(sorted(order[start : start + size]))
        start += size
    return parts


def _least_distance(counts: Tensor, parts: Sequence[Sequence[int]]) -> float:
    """The least distance between two denominators that some partition tells apart."""
    shares = torch.stack([counts[list(part)].sum(0) for part in parts]).double()
    totals = shares.sum(0)
    shares = shares[:, totals > 0] / totals[totals > 0]
    sizes = torch.tensor([len(part) for part in parts], dtype=torch.float64)
    uneven = float(sizes.std() / sizes.mean())
    even = torch.full((len(parts), 1), 1 / len(parts), dtype=torch.float64)
    shares = torch.cat([shares, even], 1)
    distances = torch.cdist(shares.T, shares.T)
    apart = distances[distances > 1e-9]
    return min(float(apart.min()), uneven) if len(apart) else 0.0
