"""Pools: loader batches put together as one, to be cut together.

Rows of several widths are padded as rows that fill a shape are. Flattened batches are
put one behind the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from trainkit.core.document_fields import KNOWN, LONGEST, MASKS, NUMBERS, OFFSETS
from trainkit.core.documents import Documents, find_flattened
from trainkit.core.nested import Field, describe, is_list, lookup, take_apart
from trainkit.core.split.layout import Layout, LayoutReader
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.split.shapes import Nothing, padding_of, widened
from trainkit.errors import TrainkitError


def joined(
    batches: Sequence[Any],
    options: MicroBatching,
    reader: LayoutReader,
    how: str,
    nothing: Nothing,
) -> Any:
    """Loader batches as one, in their order.

    Args:
        batches: at least one, with the same fields.
        options: by which they are cut.
        reader: reads which fields have rows.
        how: what tells documents apart.
        nothing: what a column must have in which nothing counts.

    Raises:
        TrainkitError: a field differs in a way in which no rows or columns do.
    """
    if len(batches) == 1:
        return batches[0]
    if options.collate is not None:
        return [sample for each in batches for sample in each]
    found = [find_flattened(each, how) for each in batches]
    documents = [each for each in found if each is not None]
    if documents and len(documents) == len(batches):
        return _one_behind_the_other(batches, documents)
    if documents:
        raise _unlike("documents", batches, "are told apart in some of them only")
    layouts = [reader.read(each).untrimmed() for each in batches]
    columns = _alike([layout.fields for layout in layouts], batches)
    values = [
        _rows_together(column, place, layouts, batches, nothing)
        for place, column in enumerate(columns)
    ]
    return layouts[0].build(iter(values))


def _alike(fields: Sequence[Sequence[Field]], batches: Any) -> list[tuple[Field, ...]]:
    """The fields of all batches, one column for each; refuses other fields."""
    paths = [[field.path for field in each] for each in fields]
    for each in paths:
        if each != paths[0]:
            names = sorted({*each} ^ {*paths[0]})
            raise _unlike(names, batches, "must have the same fields")
    return list(zip(*fields, strict=True))


def _rows_together(
    column: Sequence[Field],
    place: int,
    layouts: Sequence[Layout],
    batches: Any,
    nothing: Nothing,
) -> Any:
    path, values = column[0].path, [field.value for field in column]
    trims = [layout.trims[place] for layout in layouts]
    if all(each is None for each in trims):
        return _shared(path, values, batches)
    if any(each is None for each in trims):
        raise _unlike(path, batches, "has a row for each of the batch in some only")
    for number in range(len(layouts)):
        if own := trims[number]:
            groups = [each.rows.groups for each in layouts]
            widths = [each[own[0][1]].padded_length for each in groups]
            if len(set(widths)) > 1:
                known = {id(lookup(batches[0], at)): it for at, it in nothing.items()}
                pads = padding_of(column, layouts, known)
                of = column[number], values[number], own
                values[number] = widened(*of, max(widths), pads)
    if is_list(values[0]):
        return type(values[0])([row for each in values for row in each])
    if not all(isinstance(each, Tensor) for each in values):
        raise _unlike(path, batches, "must be a tensor or a list to be joined")
    if len({each.shape[1:] for each in values}) > 1:
        raise _unlike(
            path, batches, "differs in size, and no mask or labels tell its length"
        )
    return torch.cat(values)


def _one_behind_the_other(batches: Any, documents: Sequence[Documents]) -> Any:
    """Flattened batches as one row."""
    by = documents[0].by
    if any(len(each.numbers) > 1 for each in documents):
        raise _unlike(by, batches, "has several rows of documents")
    if by.rpartition(".")[2] not in KNOWN or any(each.by != by for each in documents):
        raise _unlike(by, batches, "must have a known name, such as position_ids")
    parts = [take_apart(each, lambda path, v: isinstance(v, list)) for each in batches]
    columns = _alike([fields for fields, _ in parts], batches)
    values = [_behind(column, documents, batches) for column in columns]
    return parts[0][1](iter(values))


def _behind(
    column: Sequence[Field], documents: Sequence[Documents], batches: Any
) -> Any:
    path, values = column[0].path, [field.value for field in column]
    name, is_named = path.rpartition(".")[2], path == documents[0].by
    widths = [each.numbers.shape[1] for each in documents]
    pairs = list(zip(values, documents, strict=True))
    if name in LONGEST:
        return max(values)
    if all(isinstance(each, list) for each in values):
        is_each = all(len(each) == len(d.spans) for each, d in pairs)
        return sum(values, []) if is_each else _shared(path, values, batches)
    if not all(isinstance(each, Tensor) for each in values):
        return _shared(path, values, batches)
    found = _of_tokens(path, values, widths, batches, is_named=is_named)
    if found is not None:
        return found
    if all(each.ndim and len(each) == len(d.spans) for each, d in pairs):
        return torch.cat(values)
    return _shared(path, values, batches)


def _of_tokens(
    path: str, values: Any, widths: Sequence[int], batches: Any, *, is_named: bool
) -> Tensor | None:
    """The entries for tokens, or where documents end; None if there are none."""
    name = path.rpartition(".")[2]
    shapes = [tuple(each.shape) for each in values]
    if name in OFFSETS:
        before = [0, *accumulate(widths)]
        ends = [int(each.flatten()[-1]) for each in values]
        if ends != widths:
            raise _unlike(path, batches, "must lead to the end of its row")
        rest = [each[..., 1:] + n for each, n in zip(values, before, strict=False)]
        return torch.cat([values[0][..., :1], *rest], -1)
    if any(
        len(s) > 2 and s[-2:] == (w, w) for s, w in zip(shapes, widths, strict=True)
    ):
        raise _unlike(path, batches, "is a mask of blocks, which cannot be joined")
    if all(s[1:3] == (1, w) for s, w in zip(shapes, widths, strict=True)):
        return torch.cat(values, 2)  # positions in several dimensions
    for dim in (1, 0):
        lead = [(1, w) if dim else (w,) for w in widths]
        if all(s[: dim + 1] == each for s, each in zip(shapes, lead, strict=True)):
            is_number = name in NUMBERS or is_named and name in MASKS
            return torch.cat(_numbered(values) if is_number else values, dim)
    return None


def _numbered(values: Sequence[Tensor]) -> list[Tensor]:
    """Numbers of documents, which continue from one batch to the next; those below the
    first one are padding."""
    found, following = [], int(values[0].flatten()[0])
    for each in values:
        first = each.flatten()[0]
        found.append(torch.where(each >= first, each - first + following, each))
        following = int(found[-1].max()) + 1
    return found


def _shared(path: str, values: Sequence[Any], batches: Any) -> Any:
    """What every row has in common, which must not differ."""
    first = values[0]
    for each in values[1:]:
        if isinstance(first, Tensor) and isinstance(each, Tensor):
            is_same = first.shape == each.shape and bool((first == each).all())
        else:
            try:
                is_same = bool(first is each or first == each)
            except Exception:  # arrays of several values, and what compares as it likes
                is_same = False
        if not is_same:
            raise _unlike(path, batches, "is shared by its rows, and differs")
    return first


def _unlike(name: Any, batches: Any, why: str) -> TrainkitError:
    return TrainkitError(
        f"MicroBatching pool: loader batches are joined, and of these {name!r} {why}: "
        f"{describe(batches[0])}, ..., {describe(batches[-1])}. Let the collate "
        f"function make them alike, or leave pool out."
    )
