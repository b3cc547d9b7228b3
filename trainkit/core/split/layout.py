"""A batch whose rows are known, and batches of some of them: trimmed, filled up to one
of few shapes, or put together with those of other batches.

A row that fills is the last one again, without what the strategy counts. A column that
fills has what its field has where it pads. A flattened row is filled by one more
document, of ignored labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainkit.core.document_fields import IGNORED
from trainkit.core.nested import Build, Field, are_equal, describe, is_list, lookup
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.split.partition import (
    columns_of,
    filled_up,
    first_fit,
    longest_first,
    width,
)
from trainkit.core.split.rows import Rows
from trainkit.core.strategies import Strategies
from trainkit.errors import TrainkitError

Trims = Sequence[tuple[int, int]]
"""The dimensions of a field to trim, each with the number of the group whose columns it
has."""

Shape = tuple[int, int]
"""Rows and columns."""

Nothing = Mapping[str | int, float]
"""The paths of what strategies count, each with the value that does not count."""


@dataclass(frozen=True)
class Layout:
    """The fields of a batch, and what becomes of each.

    Attributes:
        fields: its parts, in order.
        build: makes a batch from as many other values.
        trims: what to trim of each field; None if it is shared.
        rows: of the batch.
    """

    fields: Sequence[Field]
    build: Build
    trims: Sequence[Trims | None]
    rows: Rows

    def untrimmed(self) -> Layout:
        """A copy of this layout that gives every micro-batch all columns."""
        return replace(self, rows=self.rows.untrimmed())

    def of(self, rows: Sequence[int]) -> Any:
        """A batch of some rows, ascending, without the columns that pad in all."""
        return self.build(iter(self.values(rows)))

    def values(self, rows: Sequence[int]) -> list[Any]:
        """The fields of such a batch."""
        columns = columns_of(self.rows.spans, rows) if self.rows.groups else []
        values = []
        for (_, value), trims in zip(self.fields, self.trims, strict=True):
            for dim, group in trims or ():
                value = value[(slice(None),) * dim + (slice(*columns[group]),)]
            values.append(value if trims is None else _taken(value, rows, bool(trims)))
        return values

    def filled(self, rows: Sequence[int], shape: Shape, nothing: Any) -> Any:
        """Such a batch, filled up to a shape.

        Args:
            rows: the rows.
            shape: rows and columns.
            nothing: the values, by the identity of a field, that do not count.
        """
        missing = shape[0] - len(rows)
        taken = self.values([*rows, *[rows[-1]] * missing])
        values = []
        for place, (field, value) in enumerate(zip(self.fields, taken, strict=True)):
            trims = self.trims[place]
            if trims:
                pads = padding_of(place, [self], nothing)
                value = widened(field, value, trims, shape[1], pads)
            if id(field.value) in nothing and trims is not None and missing:
                value = value.clone()
                value[len(rows) :] = nothing[id(field.value)]
            values.append(value)
        return self.build(iter(values))


def _taken(value: Any, rows: Sequence[int], is_trimmed: bool) -> Any:
    if isinstance(value, list | tuple):
        return type(value)([value[row] for row in rows])
    if not isinstance(value, Tensor):
        return value[list(rows)]  # an array
    repeats = len(rows) > 1 and rows[-2] == rows[-1]  # a row that only fills
    if repeats or rows and rows[-1] - rows[0] + 1 != len(rows):
        return value.index_select(0, torch.tensor(rows, device=value.device))
    value = value[rows[0] : rows[-1] + 1] if rows else value[:0]
    # Models call view(), which works on a slice of rows but not of columns.
    return value.contiguous() if is_trimmed else value


def nothing_in(batch: Any, nothing: Nothing) -> dict[int, float]:
    """The values that do not count, by the identity of a batch's fields."""
    return {id(lookup(batch, path)): value for path, value in nothing.items()}


def padding_of(
    place: int, layouts: Sequence[Layout], nothing: Mapping[int, float]
) -> Any:
    """What the field at a place has where it pads, in one of these loader batches; what
    counts as nothing in it, if that is known of the first."""
    path, value = layouts[0].fields[place]
    if id(value) in nothing:
        return nothing[id(value)]
    for layout in layouts:
        trims = layout.trims[place]
        group = layout.rows.groups[trims[0][1] if trims else 0]
        for row, (start, stop) in enumerate(group.spans):
            if stop < group.padded_length or start > 0:
                column = stop if stop < group.padded_length else 0
                return layout.fields[place].value[row, column]
    are_numbers = isinstance(value, Tensor) and value.is_floating_point()
    return IGNORED if "label" in path.lower() and not are_numbers else 0


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


def the_same(path: str, values: Sequence[Any], batches: Sequence[Any]) -> Any:
    """What every row of a pool's loader batches has in common, which must not
    differ."""
    if not all(are_equal(values[0], each) for each in values[1:]):
        raise unlike(path, batches, "is shared by its rows, and differs")
    return values[0]


def unlike(name: Any, batches: Sequence[Any], why: str) -> TrainkitError:
    """An error for loader batches that cannot be put together."""
    return TrainkitError(
        f"MicroBatching pool: loader batches are joined, and of these {name!r} {why}: "
        f"{describe(batches[0])}, ..., {describe(batches[-1])}. Let the collate "
        f"function make them alike, or leave pool out."
    )


def alike(fields: Sequence[Sequence[Field]], batches: Sequence[Any]) -> Any:
    """Each field with its values in all batches; refuses other fields."""
    paths = [[field.path for field in each] for each in fields]
    for each in paths:
        if each != paths[0]:
            names = sorted({*each} ^ {*paths[0]})
            raise unlike(names, batches, "must have the same fields")
    columns = zip(*fields, strict=True)
    return [
        (path, [f.value for f in c]) for path, c in zip(paths[0], columns, strict=True)
    ]


def all_rows(
    layouts: Sequence[Layout], batches: Sequence[Any], nothing: Mapping[int, float]
) -> Any:
    """Loader batches as one, in their order.

    Args:
        layouts: of the batches.
        batches: with the same fields.
        nothing: the values, by the identity of a field, that do not count.
    """
    columns = alike([layout.fields for layout in layouts], batches)
    values = [
        _rows_together(path, column, place, layouts, batches, nothing)
        for place, (path, column) in enumerate(columns)
    ]
    return layouts[0].build(iter(values))


def _rows_together(
    path: str,
    values: list[Any],
    place: int,
    layouts: Sequence[Layout],
    batches: Sequence[Any],
    nothing: Mapping[int, float],
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


def shape_for(options: MicroBatching, rows: Rows, part: Sequence[int]) -> Shape:
    """The least shape in which rows of a loader batch fit.

    Raises:
        TrainkitError: there is none.
    """
    shapes = shapes_of(options, are_joined=rows.are_joined)
    columns = rows.real_of(part) if rows.are_joined else width(rows.spans, part)
    for shape in shapes:
        if columns <= shape[1]:
            return shape
    raise TrainkitError(
        f"MicroBatching shapes: row {part[0]} of the loader batch has {columns} "
        f"tokens, and the widest of the {len(shapes)} shapes has {shapes[-1][1]}. "
        f"Shorten such rows in the data set; or let a shape hold them: a larger "
        f"budget, tokens={columns}, and widths with it, shapes=({columns}, ...)."
    )


def parts_in_shapes(options: MicroBatching, rows: Rows) -> list[list[int]]:
    """The rows of as few micro-batches as the shapes allow.

    All shapes cost about the budget, so each is filled, the longest rows first.
    """
    if len(rows.groups) > 1:
        raise TrainkitError(
            f"MicroBatching shapes: rows must have one length each, and the batch "
            f"has {len(rows.groups)}, of {len(rows.groups)} masks. Name one of "
            f"them, lengths='path.to.mask', or leave shapes out."
        )
    lengths = [rows.real_of([row]) for row in range(rows.num_rows)]
    if rows.are_joined:
        widest = shapes_of(options, are_joined=True)[-1][1]
        return first_fit(lengths, widest, options.size)

    def fits(part: list[int]) -> bool:
        # Rows that pad on different sides are together wider than each.
        most, columns = shape_for(options, rows, part[:1])
        return len(part) <= most and width(rows.spans, part) <= columns

    return filled_up(longest_first(lengths), fits)
