"""Which rows are rehearsed, and in which parts, so that what may count differs."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainkit.core.nested import tensors
from trainkit.core.split.micro_batching import MicroBatching, is_inside
from trainkit.core.strategies import AccumulationStrategy, Strategies, Uniform
from trainkit.core.terms import leading, telling_lengths
from trainkit.lit.proof.denominators import candidates
from trainkit.lit.proof.rehearse import Rehearsal
from trainkit.lit.proof.report import NotMeasured
from trainkit.lit.proof.rows import POOL, FewRows, Parts, few_rows
from trainkit.lit.proof.subject import Subject

TRIES = 100
MOST_PARTS = 6

MEANT = 2
"""How far from simple the denominators are that must be told apart before others."""

CLEAR = 0.02
"""Shares that differ by less are hardly told apart."""


def subject_of(
    rehearsal: Rehearsal,
    strategies: Strategies,
    options: MicroBatching | None,
    batch: Any,
    *,
    trims: bool,
    has_batches: bool,
    most_rows: int,
) -> Subject:
    """Some rows of a training, in parts.

    Args:
        rehearsal: runs them.
        strategies: what a micro-batch weighs; none for plain accumulation.
        options: how loader batches are cut, if they are.
        batch: the first that the loader has yielded.
        trims: whether split windows leave columns out that are only padding.
        has_batches: whether the run's window has several loader batches.
        most_rows: how many rows, at most.
    """
    loader, cuts = rehearsal.trainer.train_dataloader, None
    if options is not None and not is_inside(options):
        cuts, options = options, replace(options, trim=trims)
        # Loader batches have widths of their own, also where none is trimmed.
        cuts = cuts if has_batches else options
    is_split, own = cuts is not None, leading(strategies) if strategies else None
    lengths = telling_lengths(strategies) if strategies else None
    rows = few_rows(loader, batch, cuts, lengths, max(most_rows, POOL))
    number = min(rows.num_rows, most_rows)
    if number < 2:
        raise NotMeasured(f"there is {number} row, which cannot be cut")
    # A single row has no BatchNorm, so four rows are two and two.
    is_equal = number == 4 or not is_split and has_equal_batches(loader)
    is_equal = is_equal and own is not None
    sizes = unlike_sizes(number, MOST_PARTS, is_equal=is_equal)
    parts = chosen_parts(rows, sizes, own or Uniform(), is_split=is_split)
    are_alike = is_split and not (trims or has_batches)
    return Subject(
        rehearsal, strategies, options, rows, parts, has_batches, are_alike=are_alike
    )


def chosen_parts(
    rows: FewRows,
    sizes: Sequence[int],
    own: AccumulationStrategy,
    *,
    is_split: bool = False,
) -> Parts:
    """Some rows in parts, so that what may be counted differs between them, and widths.

    Of random choices, the one is taken in which each part counts something, with most
    widths, and in which most denominators, first of all those that are often meant, are
    apart from the run's own.

    Args:
        rows: of which some are chosen.
        sizes: how many rows each part gets.
        own: what the run counts.
        is_split: whether the run itself cuts the rows that are chosen.
    """
    pool, lengths = rows.shortest(max(sum(sizes), POOL)), rows.lengths()
    batch, draw = rows.make(pool), random.Random(0)
    named, labels = candidates(batch, {}), _labels(batch, len(pool))
    counts = rows.counts(pool, [own.weight, *(each.weigh for each in named)])
    meant = sum(each.simplicity <= MEANT for each in named)
    tries = TRIES // 4 if is_split else TRIES
    orders = [draw.sample(range(len(pool)), sum(sizes)) for _ in range(tries)]
    if is_split:
        drawn = [[pool[place] for place in sorted(order)] for order in orders]
        cuts = rows.cuts(drawn, max(sizes))
        choices = [[[pool.index(row) for row in p] for p in parts] for parts in cuts]
    else:
        pairs = list(itertools.pairwise([0, *itertools.accumulate(sizes)]))
        choices = [[sorted(order[a:b]) for a, b in pairs] for order in orders]

    def merit(parts: Parts) -> tuple[float, ...]:
        widths = {max(lengths[pool[place]] for place in part) for part in parts}
        chosen = [place for part in parts for place in part]
        # Where all labels are unlike, or each occurs twice, classes count as rows do.
        times = [Counter(each[place] for place in chosen).values() for each in labels]
        has_kinds = any(len({*each}) > 1 for each in times)
        shares = shares_of(counts, parts, own)
        apart = (shares[:, 1:] - shares[:, :1]).norm(dim=0)
        first = float(apart[:meant].clamp(max=CLEAR).sum())
        number, is_counted = int((apart > CLEAR).sum()), bool((shares[:, 0] > 0).all())
        return is_counted, len(widths), has_kinds, first, number

    best = max(choices, key=merit)
    return [[pool[place] for place in part] for part in best]


def _labels(batch: Any, number: int) -> list[list[float]]:
    """The fields of a batch that have one label a row."""
    return [
        each.tolist()
        for each in tensors(batch)
        if each.shape == (number,) and not each.is_floating_point()
    ]


def shares_of(counts: Tensor, parts: Parts, own: AccumulationStrategy) -> Tensor:
    """What each part weighs, of all of them: parts x denominators.

    Args:
        counts: what each row counts, rows x denominators, the run's own first. What
            counts no row says nothing, and all parts weigh alike by it.
        parts: rows in parts.
        own: the run's own strategy.
    """
    in_parts = torch.stack([counts[part].sum(0) for part in parts])
    in_parts[:, in_parts.sum(0) == 0] = 1
    if isinstance(own, Uniform):
        in_parts[:, 0] = 1
    return in_parts / in_parts.sum(0)


def has_equal_batches(loader: Any) -> bool:
    """Whether all batches of a loader surely have as many rows."""
    size = getattr(loader, "batch_size", None)
    sampler: Any = getattr(loader, "sampler", None)
    if not isinstance(size, int):
        return False
    if getattr(loader, "drop_last", False):
        return True
    return hasattr(sampler, "__len__") and len(sampler) % size == 0


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
