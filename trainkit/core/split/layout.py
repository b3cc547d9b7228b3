"""A batch whose rows are known, and batches of some of them, trimmed or filled up.

A row that fills is the last one again, without what the strategy counts. A column that
fills has what its field has where it pads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainkit.core.document_fields import IGNORED
from trainkit.core.nested import Build, Field, describe, lookup
from trainkit.core.split.partition import columns_of
from trainkit.core.split.rows import Rows
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
    first = values[0]
    for each in values[1:]:
        if isinstance(first, Tensor) and isinstance(each, Tensor):
            is_same = torch.equal(first, each)
        else:
            try:
                is_same = bool(first is each or first == each)
            except Exception:  # arrays of several values, and what compares as it likes
                is_same = False
        if not is_same:
            raise unlike(path, batches, "is shared by its rows, and differs")
    return first


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
