"""Few shapes: micro-batches that are filled with what weighs nothing.

A row that fills is the last one again, without what the strategy counts. A column that
fills has what its field has where it pads. A flattened row is filled by one more
document, of ignored labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.core.document_fields import IGNORED
from trainkit.core.flattening import first_fit
from trainkit.core.nested import Field, describe, lookup
from trainkit.core.split.layout import DocumentLayout, Layout, Trims
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.split.partition import width
from trainkit.core.split.rows import Rows
from trainkit.core.strategies import Strategies
from trainkit.errors import TrainkitError

Shape = tuple[int, int]
"""Rows and columns."""

Nothing = Mapping[str | int, float]
"""The paths of what strategies count, each with the value that does not count."""


def shapes_of(options: MicroBatching, *, are_joined: bool = False) -> list[Shape]:
    """The shapes that micro-batches may have, the narrowest first.

    >>> shapes_of(MicroBatching(tokens=64, shapes=3))
    [(16, 4), (4, 16), (1, 64)]
    >>> shapes_of(MicroBatching(tokens=64, shapes=3), are_joined=True)
    [(1, 16), (1, 32), (1, 64)]
    >>> shapes_of(MicroBatching(tokens=64, shapes=(32, 20)))
    [(3, 20), (2, 32)]

    Args:
        options: the budget of tokens, and how many shapes or which widths.
        are_joined: whether rows are documents, one behind the other.
    """
    tokens, shapes = options.tokens or 0, options.shapes or 0
    widths = shapes
    if isinstance(widths, int):
        widths = [tokens // (2 if are_joined else 4) ** i for i in range(widths)]
    most = options.size or tokens
    return [
        (1 if are_joined else min(most, tokens // each), each)
        for each in sorted(set(widths) - {0})
    ]


def nothing_of(strategies: Strategies) -> Nothing:
    """What a row must have in which nothing counts."""
    found: dict[str | int, float] = {}
    for each in strategies.values():
        mask, labels = getattr(each, "mask", None), getattr(each, "labels", None)
        if mask is not None:
            found[mask] = 0
        elif labels is not None:
            found[labels] = getattr(each, "ignore_index", IGNORED)
    return found


class Shapes:
    """The few shapes of a run's micro-batches.

    Args:
        options: the budget of tokens, and how many shapes or which widths.
        nothing: what a row must have in which nothing counts.
    """

    def __init__(self, options: MicroBatching, nothing: Nothing) -> None:
        self._options, self._nothing = options, nothing

    def of(self, rows: Rows, part: Sequence[int]) -> Shape:
        """The least shape in which rows of a loader batch fit.

        Raises:
            TrainkitError: there is none.
        """
        shapes = shapes_of(self._options, are_joined=rows.are_joined)
        joined = rows.real_of(part) if rows.are_joined else width(rows.spans, part)
        for shape in shapes:
            if joined <= shape[1]:
                return shape
        raise TrainkitError(
            f"MicroBatching shapes: row {part[0]} of the loader batch has {joined} "
            f"tokens, and the widest of the {len(shapes)} shapes has {shapes[-1][1]}. "
            f"Shorten such rows in the data set; or let a shape hold them: a larger "
            f"budget, tokens={joined}, and widths with it, shapes=({joined}, ...)."
        )

    def parts(self, rows: Rows) -> list[list[int]]:
        """As few micro-batches as these shapes allow.

        All shapes cost about the budget, so each is filled, the longest rows first.
        """
        if len(rows.groups) > 1:
            raise TrainkitError(
                f"MicroBatching shapes: rows must have one length each, and the batch "
                f"has {len(rows.groups)}, of {len(rows.groups)} masks. Name one of "
                f"them, lengths='path.to.mask', or leave shapes out."
            )
        lengths = [rows.real_of([row]) for row in range(rows.num_rows)]
        order = sorted(range(rows.num_rows), key=lengths.__getitem__, reverse=True)
        shape = self.of(rows, order[:1]) if order else (0, 0)
        if rows.are_joined:
            widest = shapes_of(self._options, are_joined=True)[-1][1]
            return first_fit(lengths, widest, self._options.size)
        parts: list[list[int]] = []
        for row in order:
            part = [*parts[-1], row] if parts else [row]
            # Rows that pad on different sides are together wider than each.
            fits = len(part) <= shape[0] and width(rows.spans, part) <= shape[1]
            if parts and fits:
                parts[-1] = part
            else:
                parts.append([row])
                shape = self.of(rows, [row])
        return parts

    def filled(self, layout: Layout, part: Sequence[int], batch: Any) -> Any:
        """The micro-batch of some rows of a loader batch, in its shape."""
        num_rows, columns = self.of(layout.rows, part)
        nothing = {
            id(lookup(batch, path)): value for path, value in self._nothing.items()
        }
        if isinstance(layout, DocumentLayout):
            missing = columns - layout.rows.real_of(part)
            return layout.of_rows(part, missing=missing, nothing=nothing)
        missing = num_rows - len(part)
        taken = layout.values([*part, *[part[-1]] * missing])
        values = []
        for field, trims, value in zip(layout.fields, layout.trims, taken, strict=True):
            if trims:
                pads = padding_of([field], [layout], nothing)
                value = widened(field, value, trims, columns, pads)
            if id(field.value) in nothing and trims is not None and missing:
                value = value.clone()
                value[len(part) :] = nothing[id(field.value)]
            values.append(value)
        return layout.build(iter(values))


def padding_of(
    fields: Sequence[Field], layouts: Sequence[Layout], nothing: Mapping[int, float]
) -> Any:
    """What a field has where it pads, in one of these loader batches; what counts as
    nothing in it, if that is known."""
    first = fields[0]
    if id(first.value) in nothing:
        return nothing[id(first.value)]
    for field, layout in zip(fields, layouts, strict=True):
        trims = layout.trims[[each.path for each in layout.fields].index(field.path)]
        group = layout.rows.groups[trims[0][1] if trims else 0]
        for row, (start, stop) in enumerate(group.spans):
            if stop < group.padded_length or start > 0:
                return field.value[row, stop if stop < group.padded_length else 0]
    are_numbers = isinstance(first.value, Tensor) and first.value.is_floating_point()
    return IGNORED if "label" in first.path.lower() and not are_numbers else 0


def widened(field: Field, value: Any, trims: Trims, columns: int, pads: Any) -> Any:
    """A field with so many columns."""
    if not isinstance(value, Tensor) or [dim for dim, _ in trims] != [1]:
        raise TrainkitError(
            f"MicroBatching: field {field.path!r} must be a tensor of rows by columns "
            f"to be filled up (shapes=, pool=), with one dimension of columns, "
            f"received {describe(value)}. Make it one in the collate function."
        )
    made = value.new_empty((len(value), columns, *value.shape[2:]))
    made[:, : value.shape[1]] = value
    made[:, value.shape[1] :] = torch.as_tensor(pads, dtype=value.dtype)
    return made
