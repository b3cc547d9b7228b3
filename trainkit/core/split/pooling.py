"""Pools: loader batches put together as one, to be cut together.

Rows of several widths are padded as rows that fill a shape are. Flattened batches are
put one behind the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.core.documents import documents_option, find_flattened
from trainkit.core.nested import Field, is_list
from trainkit.core.split.flattening import Flattened
from trainkit.core.split.layout import (
    Layout,
    Nothing,
    alike,
    nothing_in,
    padding_of,
    the_same,
    unlike,
    widened,
)
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.split.reader import LayoutReader
from trainkit.core.strategies import AccumulationStrategy


def joined(
    batches: Sequence[Any],
    options: MicroBatching,
    strategy: AccumulationStrategy,
    nothing: Nothing,
) -> Any:
    """Loader batches as one, in their order.

    Args:
        batches: at least one, with the same fields.
        options: by which they are cut.
        strategy: by which they are read.
        nothing: what a column must have in which nothing counts.

    Raises:
        TrainkitError: a field differs in a way in which no rows or columns do.
    """
    if len(batches) == 1:
        return batches[0]
    if options.collate is not None:
        return [sample for each in batches for sample in each]
    how = documents_option(options, strategy)
    found = [find_flattened(each, how) for each in batches]
    documents = [each for each in found if each is not None]
    if len(documents) == len(batches):
        flat = Flattened.read(batches, documents)
        return flat.of(range(flat.rows.num_rows))
    if documents:
        raise unlike("documents", batches, "are told apart in some of them only")
    reader = LayoutReader(options, strategy)
    layouts = [reader.read(each).untrimmed() for each in batches]
    known = nothing_in(batches[0], nothing)
    values = [
        _rows_together(path, column, place, layouts, batches, known)
        for place, (path, column) in enumerate(
            alike([layout.fields for layout in layouts], batches)
        )
    ]
    return layouts[0].build(iter(values))


def _rows_together(
    path: str,
    values: list[Any],
    place: int,
    layouts: Sequence[Layout],
    batches: Sequence[Any],
    nothing: dict[int, float],
) -> Any:
    """A field with the rows of all batches."""
    trims = [layout.trims[place] for layout in layouts]
    if all(each is None for each in trims):
        return the_same(path, values, batches)
    if any(each is None for each in trims):
        raise unlike(path, batches, "has a row for each of the batch in some only")
    if all(trims):
        groups = [own[0][1] for own in trims if own]
        widths = [
            layout.rows.groups[group].padded_length
            for layout, group in zip(layouts, groups, strict=True)
        ]
        if len({*widths}) > 1:
            pads = padding_of(place, layouts, nothing)
            values = [
                widened(Field(path, value), value, own or (), max(widths), pads)
                for value, own in zip(values, trims, strict=True)
            ]
    if is_list(values[0]):
        return type(values[0])([row for each in values for row in each])
    if not all(isinstance(each, Tensor) for each in values):
        raise unlike(path, batches, "must be a tensor or a list to be joined")
    if len({each.shape[1:] for each in values}) > 1:
        raise unlike(
            path, batches, "differs in size, and no mask or labels tell its length"
        )
    return torch.cat(values)
