"""Which rows of a batch go into which part, so that denominators can be told apart."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

Parts = list[list[int]]

TRIES = 200
FEW_TRIES = 100
CLEAR = 0.02
MOST_COUNTS = 200


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
    if num_parts == 1:
        return [list(range(num_rows))]
    counts = counts[:, :MOST_COUNTS].unique(dim=1)
    drawn = [_drawn(draw, num_rows, num_parts, least) for _ in range(TRIES)]
    return drawn[int(_least_distances(counts, drawn).argmax())]


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


def _least_distances(counts: Tensor, partitions: Sequence[Parts]) -> Tensor:
    """For each partition, the least distance between two denominators that it tells
    apart."""
    within = torch.zeros(len(partitions), len(partitions[0]), len(counts))
    for number, parts in enumerate(partitions):
        for part, rows in enumerate(parts):
            within[number, part, rows] = 1
    within = within.double()
    shares = within @ counts.double()
    totals = shares[0].sum(0)
    shares = shares[..., totals > 0] / totals[totals > 0]
    sizes = within.sum(2)
    uneven = sizes.std(1) / sizes.mean(1)
    even = torch.full((*sizes.shape, 1), 1 / sizes.shape[1], dtype=torch.float64)
    shares = torch.cat([shares, even], 2).transpose(1, 2)
    distances = torch.cdist(shares, shares).flatten(1)
    apart = distances.where(distances > 1e-9, torch.inf).amin(1)
    return torch.where(apart.isinf(), 0.0, torch.minimum(apart, uneven))
