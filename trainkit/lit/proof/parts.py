"""Which rows are rehearsed, and in which parts, so that what may count differs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
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
    """Some rows in parts, so that what may be counted differs between them, and widths.

    Of random choices, the one is taken in which the shares of the parts differ most
    often between denominators.

    Args:
        rows: of which some are chosen.
        sizes: how many rows each part gets.
        own: what the run counts, if the parts should differ from that above all. Rows
            that count nothing by it are left out where others suffice.
        is_split: whether the run itself cuts the rows that are chosen.
    """
    pool, number = rows.shortest(max(sum(sizes), POOL)), sum(sizes)
    batch, all_lengths = rows.make(pool), rows.lengths()
    lengths, labels = [all_lengths[row] for row in pool], _labels(batch, len(pool))
    named = [each.weigh for each in candidates(batch, {})]
    counts = rows.counts(pool, named if own is None else [own.weight, *named])
    places = list(range(len(pool)))
    if own is not None:
        counting = [place for place in places if float(counts[place, 0]) > 0]
        places = counting if len(counting) >= number else places
    draw, best = random.Random(0), list[tuple[Any, Parts]]()
    bounds = [0, *itertools.accumulate(sizes)]
    for _ in range(TRIES // 8 if is_split else TRIES):
        order = draw.sample(places, number)
        parts = [sorted(order[a:b]) for a, b in itertools.pairwise(bounds)]
        if is_split:
            cut = rows.cut([pool[place] for place in sorted(order)], max(sizes))
            parts = [[pool.index(row) for row in part] for part in cut]
        apart = _apart(counts, parts, has_own=own is not None)
        least = float(apart.min()) if len(apart) else 0.0
        widths = {max(lengths[place] for place in part) for part in parts}
        # Parts of one class each would look alike to what counts classes.
        kinds = {_kind(labels[part]) for part in parts}
        best.append(((len(widths), len(kinds), len(apart), least), parts))
    parts = max(best, key=lambda each: each[0])[1]
    return [[pool[place] for place in part] for part in parts]


def _apart(counts: Tensor, parts: Parts, *, has_own: bool) -> Tensor:
    """How far denominators are apart by the shares of parts, where that is clear; the
    first one from the others, if it is the run's own."""
    shares = shares_of(counts, parts)
    if has_own:
        apart = (shares - shares[:, :1]).norm(dim=0)
        apart[:-1] *= counts[sum(parts, [])].sum(0) != 0  # else it says nothing
    else:
        apart = torch.pdist(shares.T)
    return apart[apart > CLEAR]


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
        most: how many parts, if there are two rows for each, and one more.
        is_equal: whether all parts have as many rows.
    """
    number = max(2, min(most, (rows if is_equal else rows - 1) // 2))
    sizes = [rows // number] * number
    if is_equal:
        return sizes
    for place in range(rows % number):
        sizes[-1 - place] += 1
    for place in range(number // 2):  # the first are shorter, the last longer
        moves = min(sizes[place] - (1 if rows < 5 else 2), number // 2 - place)
        sizes[place] -= max(moves, 0)
        sizes[-1 - place] += max(moves, 0)
    return sizes
