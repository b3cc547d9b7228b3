"""Whether what lies behind the rows' lengths is padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainkit.core.split.rows import Group


def is_padding(values: Any, group: Group, padding: Tensor) -> bool:
    """Whether a field holds nothing where its rows are padding.

    Each row may hold one value behind its end, and one before its beginning. Columns
    may be numbered, or be the same in rows of different lengths, as positions are.

    >>> group = Group.make(3, [(0, 3), (0, 1)])
    >>> padding = torch.tensor([[False, False, False], [False, True, True]])
    >>> is_padding(torch.tensor([[7, 8, 9], [7, 0, 0]]), group, padding)
    True
    >>> is_padding(torch.tensor([[7, 8, 9], [7, 0, 5]]), group, padding)
    False

    Args:
        values: a tensor or array, rows by columns by anything.
        group: the rows' lengths.
        padding: True where a row is padding, rows by columns.
    """
    if not isinstance(values, Tensor):
        values = torch.as_tensor(values)
    padding = padding.to(values.device)
    if not _is_constant(values, group, padding):
        return _is_alike(values, group)
    return not _counts_everywhere(values, padding)


def _is_constant(values: Tensor, group: Group, padding: Tensor) -> bool:
    """Whether each row holds one value on each side of what it has."""
    where = padding.view(*padding.shape, *[1] * (values.ndim - 2))
    edge = values[:, -1:]
    if group.begins_late:
        before = torch.tensor([[start] for start, _ in group.spans])
        left = (torch.arange(group.padded_length) < before).to(values.device)
        edge = torch.where(left.view(where.shape), values[:, :1], edge)
    differs = (values != edge) & where
    if not bool(differs.any()):
        return True
    if not (values.is_floating_point() or values.is_complex()):
        return False
    differs &= (values == values) | (edge == edge)  # NaN is like NaN
    return not bool(differs.any())


def _is_alike(values: Tensor, group: Group) -> bool:
    """Whether all rows hold the same, which cannot be theirs: they are of different
    lengths, or the columns are numbered."""
    if not bool((values == values[:1]).all()):
        return False
    if len(set(group.spans)) > 1:
        return True
    is_whole = not values.is_floating_point() and values.dtype is not torch.bool
    return is_whole and bool((values[:1, 1:] == values[:1, :-1] + 1).all())


def _counts_everywhere(values: Tensor, padding: Tensor) -> bool:
    """Whether it is a mask, and says of a row with padding that all of it counts."""
    if values.ndim != 2 or not bool((values[:, [0, -1]] == 1).all(1).any()):
        return False
    one = values == 1
    if not bool((one.all(1) & padding.any(1)).any()):
        return False
    return bool((one | (values == 0)).all())
