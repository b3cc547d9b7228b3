"""Which module is the first whose output for a row changes with its padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainkit.lit.proof.events import Event, alike, recorded
from trainkit.lit.proof.measure import Measurements


def first_that_sees_padding(found: Measurements) -> str:
    """The path of the module; "training_step" where all of them agree.

    A row that is the longest of its part has no padding there. In the whole it may
    have, and what belongs to the row itself must be equal.
    """
    passes = found.passes
    with recorded(passes.module) as whole:
        passes.run(found.batch, found.all_rows)
    for rows in found.parts:
        with recorded(passes.module) as part:
            passes.run(found.rows.as_run(rows), rows)
        for side in (0, 1):
            place = _first(whole, part, rows, found, side)
            if place is not None:
                return place
    return "training_step"


def _first(
    whole: Sequence[Event],
    part: Sequence[Event],
    rows: Sequence[int],
    found: Measurements,
    side: int,
) -> str | None:
    """The first module whose output is another, where inputs begin alike."""
    if len(whole) != len(part):
        return None
    has_agreed = False
    for one, other in zip(whole, part, strict=True):
        for value, cut in zip(one.values, other.values, strict=False):
            if not value.is_floating_point() or not value.ndim:
                continue
            pair = _row_pairs(value, cut, rows, len(found.all_rows), side)
            if pair is None:
                continue
            if alike(*pair):
                has_agreed = True
            elif has_agreed:
                return one.path
            else:
                return None
    return None


def _row_pairs(
    whole: Tensor, part: Tensor, rows: Sequence[int], num_rows: int, side: int
) -> tuple[Tensor, Tensor] | None:
    """The values of the rows of a part in both, on the columns of the part."""
    if whole.ndim != part.ndim or whole.shape[:1] != (num_rows,):
        return None
    if part.shape[0] != len(rows):
        return None
    at = torch.tensor(list(rows), device=whole.device)
    chosen = whole.index_select(0, at)
    for dim in range(1, part.ndim):
        extra = chosen.shape[dim] - part.shape[dim]
        if extra < 0:
            return None
        chosen = chosen.narrow(dim, extra if side else 0, part.shape[dim])
    return chosen, part
