"""Where rows are padding, and whether a field really is padding there."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from trainkit.core.split.rows import Group

Answer = Literal["yes", "no", "unknown"]

MANY = 8
"""So many entries of one value are padding, whatever the value."""


def padding_of(group: Group) -> Tensor:
    """Where a group's rows are padding: True there, rows by columns."""
    columns = torch.arange(group.padded_length)
    starts, stops = torch.tensor(list(group.spans), dtype=torch.long).T.unsqueeze(2)
    after = columns >= stops
    return after | (columns < starts) if group.begins_late else after


def is_padding(values: Any, group: Group, padding: Tensor) -> Answer:
    """Whether a field holds no information where its rows are padding.

    All rows must hold one single value behind their ends, and one before their
    beginnings. Numbered columns may continue or stop there, and rows may be constant or
    all alike: such columns hold no information anywhere. A few entries could be equal
    by chance, so they must be 0 or another number that stands for no value.

    >>> group = Group.make(3, [(0, 3), (0, 1)])
    >>> padding = torch.tensor([[False, False, False], [False, True, True]])
    >>> is_padding(torch.tensor([[7, 8, 9], [7, 0, 0]]), group, padding)
    'yes'
    >>> is_padding(torch.tensor([[7, 8, 9], [7, 0, 5]]), group, padding)
    'no'

    Args:
        values: a tensor or array, rows by columns by anything.
        group: the rows' lengths.
        padding: True where a row is padding, rows by columns.
    """
    if not isinstance(values, Tensor):
        values = torch.as_tensor(values)
    padding = padding.to(values.device)
    answer: Answer = "yes"
    for side, number, is_left in _sides(group):
        row = max(range(len(group.spans)), key=side.__getitem__)
        one = values[row, 0 if is_left else -1]
        where = padding
        if group.begins_late:
            starts = torch.tensor([start for start, _ in group.spans]).unsqueeze(1)
            before = (torch.arange(group.padded_length) < starts).to(values.device)
            where = padding & (before if is_left else ~before)
        if not is_all(values, one, where):
            return "yes" if _is_uninformative(values, group) else "no"
        if _counts_there(values, one, padding):
            return "no"
        if number < MANY and not _is_nothing(one):
            answer = "unknown"
    if answer == "unknown" and _is_uninformative(values, group):
        return "yes"
    return answer


def _sides(group: Group) -> list[tuple[list[int], int, bool]]:
    """How much padding each row has, and all together, on each side that has some."""
    right = [group.padded_length - stop for _, stop in group.spans]
    left = [start for start, _ in group.spans]
    sides = [(right, sum(right), False), (left, sum(left), True)]
    return [side for side in sides if side[1]]


def is_all(values: Tensor, one: Tensor, where: Tensor) -> bool:
    """Whether all values at some rows and columns are one value; NaN equals NaN."""
    where = where.view(*where.shape, *[1] * (values.ndim - 2))
    differs = values != one
    if values.is_floating_point() or values.is_complex():
        differs &= (values == values) | (one == one)
    return not bool((differs & where).any())


def _is_nothing(one: Tensor) -> bool:
    """Whether it is a number that commonly stands for no value."""
    is_empty = (one == 0) | (one == -100)
    if one.is_floating_point():
        is_empty |= ~one.isfinite()
    return bool(is_empty.all())


def _is_uninformative(values: Tensor, group: Group) -> bool:
    """Whether columns are numbered, or rows are alike or constant."""
    if len(set(group.spans)) > 1 and bool((values == values[:1]).all()):
        return True  # although the rows have different lengths
    if values.ndim != 2 or values.is_floating_point() or values.is_complex():
        return False
    numbers = values.long()
    steps = numbers[:, 1:] - numbers[:, :-1]
    if not bool(((steps == 0) | (steps == 1)).all()):
        return False
    if not bool(steps.any()):
        return True
    lowest, highest = int(numbers.min()), int(numbers.max())
    return highest > 1 and highest - lowest < group.padded_length  # no marks, no tokens


def _counts_there(values: Tensor, one: Tensor, padding: Tensor) -> bool:
    """Whether it is a mask, or weights, by which columns that are padding count."""
    if values.ndim != 2 or not bool(one != 0):
        return False
    if values.is_floating_point() and bool((values == one).all()):
        return True
    if not bool(one == 1) or not bool(((values == 1) | (values == 0)).all()):
        return False
    return bool(((values == 1) & ~padding).any())
