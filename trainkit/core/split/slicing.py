"""The pieces of a batch's fields that go into its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.core.split.layout import Layout
from trainkit.core.split.partition import Span, columns_of


def slices_of(layout: Layout, parts: Sequence[Sequence[int]]) -> list[list[Any]]:
    """The pieces of each field, one for each micro-batch.

    Args:
        layout: the batch's fields and rows, and what to trim.
        parts: the rows of each micro-batch, ascending.
    """
    sizes = _sizes_in_order(parts, layout.rows.num_rows)
    spans, trims = layout.rows.spans, layout.trims
    columns = [columns_of(spans, rows) if trims else [] for rows in parts]
    indices: dict[tuple[int, torch.device], Tensor] = {}
    pieces = []
    for number, field in enumerate(layout.fields):
        if number not in layout.cut:
            pieces.append([field.value] * len(parts))
            continue
        each = trims.get(number, ())
        if sizes is not None and not each and isinstance(field.value, Tensor):
            pieces.append(list(field.value.split(sizes)))
            continue
        pieces.append(
            [
                _piece(field.value, rows, part, each, columns[part], indices)
                for part, rows in enumerate(parts)
            ]
        )
    return pieces


def _sizes_in_order(parts: Sequence[Sequence[int]], num_rows: int) -> list[int] | None:
    """How many rows each micro-batch has, if together they are all rows in order."""
    behind = 0
    for rows in parts:
        if not rows or rows[0] != behind or rows[-1] - behind + 1 != len(rows):
            return None
        behind += len(rows)
    return [len(rows) for rows in parts] if behind == num_rows else None


def _piece(
    value: Any,
    rows: Sequence[int],
    part: int,
    trims: Sequence[tuple[int, int]],
    columns: Sequence[Span],
    indices: dict[tuple[int, torch.device], Tensor],
) -> Any:
    """A field's rows, without the columns that are padding in all of them."""
    if not isinstance(value, Tensor):
        return _piece_of_other(value, rows, trims, columns)
    trimmed = value
    for dim, group in trims:
        first, stop = columns[group]
        if stop - first < value.shape[dim]:
            trimmed = trimmed.narrow(dim, first, stop - first)
    num_rows = len(rows)
    if not num_rows or rows[-1] - rows[0] + 1 == num_rows:
        if num_rows < value.shape[0]:
            trimmed = trimmed.narrow(0, rows[0], num_rows)
        # Models call view(), which works on a slice of rows but not of columns.
        return trimmed if not trims else trimmed.contiguous()
    key = (part, value.device)
    if key not in indices:
        indices[key] = torch.tensor(rows, device=value.device)
    return trimmed.index_select(0, indices[key])


def _piece_of_other(
    value: Any,
    rows: Sequence[int],
    trims: Sequence[tuple[int, int]],
    columns: Sequence[Span],
) -> Any:
    if isinstance(value, list | tuple):
        return type(value)([value[row] for row in rows])
    found = value[list(rows)]  # an array
    for dim, group in trims:
        found = found[(slice(None),) * dim + (slice(*columns[group]),)]
    return found
