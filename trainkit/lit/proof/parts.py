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
from trainkit.core.strategies import AccumulationStrategy, Strategies
from trainkit.core.terms import leading, telling_lengths
from trainkit.lit.proof.denominators import candidates
from trainkit.lit.proof.rehearse import Rehearsal
from trainkit.lit.proof.report import NotMeasured
from trainkit.lit.proof.rows import POOL, FewRows, Parts, few_rows
from trainkit.lit.proof.subject import Subject

TRIES = 200
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
    parts = chosen_parts(rows, sizes, own, is_split=is_split)
    are_alike = is_split and not (trims or has_batches)
    return Subject(
        rehearsal, strategies, options, rows, parts, has_batches, are_alike=are_alike
    )


def chosen_parts(
    rows: FewRows,
    sizes: Sequence[int],
    own: AccumulationStrategy | None = None,
    *,
    is_split: bool = False,
) -> Parts:
    """Some rows in parts, so that what may be counted differs between them, and widths.

    Of random choices, the one is taken in which the shares of the parts differ most
    often between denominators, first of all those that are often meant.

    Args:
        rows: of which some are chosen.
        sizes: how many rows each part gets.
        own: what the run counts, if the parts should differ from that above all. Where
            others suffice, one row is chosen that counts nothing by it, beside others:
            the loss may count it, and in a part by itself it has no mean.
        is_split: whether the run itself cuts the rows that are chosen.
    """
    pool, number = rows.shortest(max(sum(sizes), POOL)), sum(sizes)
    batch, all_lengths = rows.make(pool), rows.lengths()
    lengths, labels = [all_lengths[row] for row in pool], _labels(batch, len(pool))
    named = candidates(batch, {})
    weighs = [each.weigh for each in named]
    counts = rows.counts(pool, weighs if own is None else [own.weight, *weighs])
    meant = sum(each.simplicity <= MEANT for each in named) + (own is not None)
    places, idle = list(range(len(pool))), list[int]()
    is_counted = [own is None or float(count[0]) > 0 for count in counts]
    if sum(is_counted) >= number:
        idle = [place for place in places if not is_counted[place]][: number > 2]
        places = [place for place in places if is_counted[place]]
    draw, bounds = random.Random(0), [0, *itertools.accumulate(sizes)]
    tries = TRIES // 8 if is_split else TRIES
    few = number - len(idle)  # the last part, which gets it, has two rows or more
    orders = [draw.sample(places, few) + idle for _ in range(tries)]
    if is_split:
        chosen = [[pool[place] for place in sorted(order)] for order in orders]
        cuts = rows.cuts(chosen, max(sizes))
        choices = [[[pool.index(row) for row in p] for p in parts] for parts in cuts]
    else:
        pairs = list(itertools.pairwise(bounds))
        choices = [[sorted(order[a:b]) for a, b in pairs] for order in orders]
    apart = _apart(counts, choices, meant, has_own=own is not None)

    def merit(choice: int) -> tuple[float, ...]:
        parts = choices[choice]
        widths = {max(lengths[place] for place in part) for part in parts}
        # Parts of one class each would look alike to what counts classes.
        kinds = {_kind(labels, part) for part in parts}
        each_counts = all(any(is_counted[place] for place in part) for part in parts)
        return each_counts, len(widths), len(kinds), *apart[choice]

    best = choices[max(range(len(choices)), key=merit)]
    return [[pool[place] for place in part] for part in best]


def _apart(
    counts: Tensor, choices: Sequence[Parts], meant: int, *, has_own: bool
) -> list[tuple[float, ...]]:
    """For each choice of parts, how clearly denominators that are often meant are apart
    by what the parts weigh, how many are apart at all, and how far at least; the first
    one from the others, if it is the run's own."""
    shares = shares_of(counts, choices)
    if has_own:
        apart = (shares - shares[..., :1]).norm(dim=1)
        apart[:, :-1] *= shares[..., :-1].sum(1) > 0.5  # else it says nothing
        other = torch.arange(shares.shape[-1])
    else:
        one, other = torch.triu_indices(shares.shape[-1], shares.shape[-1], 1)
        apart = (shares[..., one] - shares[..., other]).norm(dim=1)
    is_clear = apart > CLEAR
    least = apart.where(is_clear, torch.inf).amin(1)
    first = apart[:, other < meant].clamp(max=CLEAR).sum(1)
    number = is_clear.sum(1)
    least = least.where(number > 0, 0)
    return list(zip(first.tolist(), number.tolist(), least.tolist(), strict=True))


def _labels(batch: Any, number: int) -> list[list[float]]:
    """The fields of a batch that have one label a row."""
    return [
        each.tolist()
        for each in tensors(batch)
        if each.shape == (number,) and not each.is_floating_point()
    ]


def _kind(labels: Sequence[Sequence[float]], part: Sequence[int]) -> tuple[Any, ...]:
    """How often each label occurs, whichever it is; of no label, how many rows."""
    counts = (Counter(column[row] for row in part) for column in labels)
    return len(part), *(tuple(sorted(each.values())) for each in counts)


def shares_of(counts: Tensor, choices: Sequence[Parts]) -> Tensor:
    """What each part of several choices weighs, of all of its choice.

    Args:
        counts: what each row counts, rows x denominators.
        choices: rows in parts; where one has fewer parts, these weigh nothing.

    Returns:
        Choices x parts x denominators, and one more, by which all parts weigh alike.
    """
    most, own = max(map(len, choices)), len(counts)
    places = [
        (choice, place, row)
        for choice, parts in enumerate(choices)
        for place, part in enumerate(parts)
        for row in (*part, own)
    ]
    members = torch.zeros(len(choices), most, own + 1, dtype=counts.dtype)
    members[tuple(torch.tensor(places).T)] = 1
    rows = torch.nn.functional.pad(counts, (0, 1, 0, 1))
    rows[-1, -1] = 1
    in_parts = members @ rows
    return in_parts / in_parts.sum(1, keepdim=True).clamp_min(1e-9)


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
