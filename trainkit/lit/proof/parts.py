"""Which rows are rehearsed, and in which parts, so that what may count differs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.core.nested import tensors
from trainkit.core.strategies import AccumulationStrategy
from trainkit.lit.proof.denominators import candidates
from trainkit.lit.proof.rows import POOL, FewRows, Parts

TRIES = 200

CLEAR = 0.02
"""Shares that differ by less are hardly told apart."""


def chosen_parts(
    rows: FewRows,
    sizes: Sequence[int],
    own: AccumulationStrategy | None = None,
    *,
    is_split: bool = False,
) -> Parts:
    """Some rows in parts, so that what may be counted differs between them.

    Args:
        rows: of which some are chosen.
        sizes: how many rows each part gets.
        own: what the run counts, if the parts should differ from that above all.
        is_split: whether the run itself cuts the rows that are chosen.
    """
    pool = rows.shortest(max(sum(sizes), POOL))
    batch = rows.make(pool)
    named = candidates(batch, {})
    weighs = [*([] if own is None else [own.weight]), *(each.weigh for each in named)]
    lengths = rows.lengths()

    def cut(places: list[int]) -> Parts:
        parts = rows.cut([pool[place] for place in places], max(sizes))
        return [[pool.index(row) for row in part] for part in parts]

    found = unlike_parts(
        rows.counts(pool, weighs),
        sizes,
        [lengths[row] for row in pool],
        own=None if own is None else 0,
        labels=_labels(batch, len(pool)),
        cut=cut if is_split else None,
    )
    return [[pool[place] for place in part] for part in found]


def unlike_parts(
    counts: Tensor,
    sizes: Sequence[int],
    lengths: Sequence[int] | None = None,
    own: int | None = None,
    labels: Tensor | None = None,
    cut: Callable[[list[int]], Parts] | None = None,
) -> Parts:
    """Rows in parts that tell denominators apart, and widths.

    Of random choices, the one is taken in which the shares of the parts differ most
    often between denominators.

    >>> unlike_parts(torch.tensor([[1.0, 3], [1, 3], [1, 9]]), [1, 1], own=0)
    [[1], [2]]

    Args:
        counts: one row for each row, one column for each denominator.
        sizes: how many rows each part gets.
        lengths: of the rows, if parts should have unlike ones.
        own: a column, if that one must differ from others. Rows that count nothing by
            it are left out where others suffice.
        labels: one row for each row, one column for each field with one label a row.
        cut: cuts chosen rows as the run would; default: by sizes alone.
    """
    draw, pool = random.Random(0), list(range(len(counts)))
    if own is not None:
        counting = [row for row in pool if float(counts[row, own]) > 0]
        pool = counting if len(counting) >= sum(sizes) else pool
    best: tuple[Any, Parts] = (), []
    bounds = [0, *itertools.accumulate(sizes)]
    for _ in range(TRIES if cut is None else TRIES // 8):
        order = draw.sample(pool, sum(sizes))
        parts = [sorted(order[a:b]) for a, b in itertools.pairwise(bounds)]
        parts = parts if cut is None else cut(sorted(order))
        shares = shares_of(counts, parts)
        if own is None:
            apart = torch.pdist(shares.T)
        else:
            apart = (shares - shares[:, [own]]).norm(dim=0)
            apart[:-1] *= counts[sum(parts, [])].sum(0) != 0  # else it says nothing
        clear = apart[apart > CLEAR]
        widths = {max(lengths[row] for row in part) for part in parts if lengths}
        # Parts of one class each would look alike to what counts classes.
        kinds = {_kind(labels[part]) for part in parts} if labels is not None else ()
        least = float(clear.min()) if len(clear) else 0.0
        score = len(widths), len(kinds), len(clear), least
        best = max(best, (score, parts), key=lambda each: each[0])
    return best[1]


def _labels(batch: Any, number: int) -> Tensor:
    """The fields of a batch that have one label a row, side by side."""
    found = [torch.zeros(number, dtype=torch.float64)]
    for each in tensors(batch):
        if each.shape == (number,) and not each.is_floating_point():
            found.append(each.double().cpu())
    return torch.stack(found, 1)


def _kind(labels: Tensor) -> tuple[Any, ...]:
    """How often each label occurs, whichever it is."""
    counts = [column.unique(return_counts=True)[1].tolist() for column in labels.T]
    return tuple(tuple(sorted(each)) for each in counts)


def shares_of(counts: Tensor, parts: Parts) -> Tensor:
    """What each part weighs of all, by each denominator, and if all weigh alike."""
    in_parts = torch.stack([counts[part].sum(0) for part in parts])
    shares = in_parts / in_parts.sum(0).clamp_min(1e-9)
    return torch.cat([shares, torch.full((len(parts), 1), 1 / len(parts))], 1)


def unlike_sizes(rows: int, most: int, *, is_equal: bool) -> list[int]:
    """How many of some rows each of several parts gets.

    >>> unlike_sizes(24, 6, is_equal=False)
    [2, 2, 3, 5, 6, 6]

    Args:
        rows: how many there are.
        most: how many parts, if there are two rows for each.
        is_equal: whether all parts have as many rows.
    """
    number = max(2, min(most, rows // 2))
    sizes = [rows // number] * number
    if is_equal:
        return sizes
    for place in range(rows % number):
        sizes[-1 - place] += 1
    for place in range(number // 2):  # the first are shorter, the last longer
        moves = min(sizes[place] - (1 if rows < 4 else 2), number // 2 - place)
        sizes[place] -= max(moves, 0)
        sizes[-1 - place] += max(moves, 0)
    return sizes
