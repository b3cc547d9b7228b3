"""The loader batches of a pool, put together to one that is cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.core.nested import Field, is_list
from trainkit.core.split.flattening import Flattened, alike, the_same, unlike
from trainkit.core.split.layout import Layout
from trainkit.core.split.shapes import padding_of, widened


def joined(
    layouts: Sequence[Layout], batches: Sequence[Any], nothing: Mapping[int, float]
) -> Any:
    """Loader batches as one, in their order. Rows of several widths are padded;
    flattened batches are put one behind the other.

    Args:
        layouts: of the batches.
        batches: with the same fields.
        nothing: the values, by the identity of a field, that do not count.

    Raises:
        TrainkitError: a field differs in a way in which no rows or columns do.
    """
    flat = [each.documents[0] for each in layouts if isinstance(each, Flattened)]
    if len(flat) == len(batches):
        whole = Flattened.read(batches, flat)
        return whole.of(range(whole.rows.num_rows))
    if flat:
        raise unlike("documents", batches, "are told apart in some of them only")
    columns = alike([layout.fields for layout in layouts], batches)
    values = []
    for place, (path, column) in enumerate(columns):
        trims = [layout.trims[place] for layout in layouts]
        if all(each is None for each in trims):
            values.append(the_same(path, column, batches))
        elif any(each is None for each in trims):
            why = "has a row for each of the batch in some only"
            raise unlike(path, batches, why)
        else:
            if all(trims):
                column = _as_wide(path, column, place, layouts, nothing)
            values.append(_below_each_other(path, column, batches))
    return layouts[0].build(iter(values))


def _as_wide(
    path: str,
    values: list[Any],
    place: int,
    layouts: Sequence[Layout],
    nothing: Mapping[int, float],
) -> list[Any]:
    """The columns of a field, padded to those of the widest batch."""
    trims = [list(layout.trims[place] or ()) for layout in layouts]
    widths = [
        layout.rows.groups[own[0][1]].padded_length
        for layout, own in zip(layouts, trims, strict=True)
    ]
    if len({*widths}) == 1:
        return values
    pads = padding_of(place, layouts, nothing)
    return [
        widened(Field(path, value), value, own, max(widths), pads)
        for value, own in zip(values, trims, strict=True)
    ]


def _below_each_other(path: str, values: list[Any], batches: Sequence[Any]) -> Any:
    """A field with the rows of all batches."""
    if is_list(values[0]):
        return type(values[0])([row for each in values for row in each])
    if not all(isinstance(each, Tensor) for each in values):
        raise unlike(path, batches, "must be a tensor or a list to be joined")
    if len({each.shape[1:] for each in values}) > 1:
        raise unlike(
            path, batches, "differs in size, and no mask or labels tell its length"
        )
    return torch.cat(values)
