"""Batches that are filled up: micro-batches to one of few shapes, for compiled models,
and the loader batches of a pool to one width, to be joined.

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
from trainkit.core.nested import are_equal, describe, is_list, lookup
from trainkit.core.split.flattening import Flattened
from trainkit.core.split.layout import Layout
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.split.partition import filled_up, first_fit, longest_first, width
from trainkit.core.split.rows import Rows
from trainkit.core.strategies import Strategies
from trainkit.errors import TrainkitError

Shape = tuple[int, int]
"""Rows and columns."""


def nothing_in(batch: Any, strategies: Strategies) -> dict[int, float]:
    """The values that do not count, by the identity of a batch's fields."""
    found = dict[int, float]()
    for each in strategies.values():
        mask, labels = getattr(each, "mask", None), getattr(each, "labels", None)
        if mask is not None:
            found[id(lookup(batch, mask))] = 0
        elif labels is not None:
            ignored = getattr(each, "ignore_index", IGNORED)
            found[id(lookup(batch, labels))] = ignored
    return found


def counts_every_row(strategy: Any) -> bool:
    """Whether nothing in a row could say that it weighs nothing."""
    return all(getattr(strategy, name, None) is None for name in ("mask", "labels"))


def refuse_rows_that_count(strategies: Strategies) -> None:
    """Refuse to fill a micro-batch with rows for a strategy that would count them."""
    for each in strategies.values():
        if counts_every_row(each):
            raise TrainkitError(
                f"MicroBatching shapes: rows that fill a micro-batch must weigh "
                f"nothing, and {type(each).__name__} has neither a mask nor labels "
                f"that say what of a row counts. Use PerToken(), or "
                f"PerSample(mask='weights') with a weight for each row, by which the "
                f"loss is a weighted mean; or leave shapes out."
            )


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
    tokens, widths = options.tokens or 0, options.shapes or 0
    if isinstance(widths, int):
        widths = [tokens // (2 if are_joined else 4) ** i for i in range(widths)]
    most = options.size or tokens
    return [
        (1 if are_joined else min(most, tokens // each), each)
        for each in sorted(set(widths) - {0})
    ]


def shape_for(options: MicroBatching, rows: Rows, part: Sequence[int]) -> Shape:
    """The least shape in which rows of a loader batch fit.

    Raises:
        TrainkitError: there is none.
    """
    shapes = shapes_of(options, are_joined=rows.are_joined)
    columns = rows.real_of(part) if rows.are_joined else width(rows.groups, part)
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
    if (number := len(rows.spans)) > 1:
        raise TrainkitError(
            f"MicroBatching shapes: rows must have one length each, and the batch "
            f"has {number}, of {number} masks. Name one of "
            f"them, lengths='path.to.mask', or leave shapes out."
        )
    if rows.are_joined:
        widest = shapes_of(options, are_joined=True)[-1][1]
        return first_fit(rows.lengths, widest, options.size)

    def fits(part: list[int]) -> bool:
        # Rows that pad on different sides are together wider than each.
        most, columns = shape_for(options, rows, part[:1])
        return len(part) <= most and width(rows.groups, part) <= columns

    return filled_up(longest_first(rows.lengths), fits)


def filled(
    layout: Layout, rows: Sequence[int], shape: Shape, nothing: Mapping[int, float]
) -> Any:
    """A batch of some rows, ascending, filled up to a shape.

    Args:
        layout: of the loader batch.
        rows: the rows.
        shape: rows and columns.
        nothing: the values, by the identity of a field, that do not count.
    """
    if isinstance(layout, Flattened):
        return layout.filled(rows, shape[1], nothing)
    missing = shape[0] - len(rows)
    values = layout.values([*rows, *[rows[-1]] * missing])
    for place, (field, cut) in enumerate(zip(layout.fields, layout.cuts, strict=True)):
        if cut:
            pads = padding_of(place, [layout], nothing)
            values[place] = widened(field.path, values[place], shape[1], pads)
        if cut is not None and missing and id(field.value) in nothing:
            values[place] = values[place].clone()
            values[place][len(rows) :] = nothing[id(field.value)]
    return layout.build(iter(values))


# ---- the loader batches of a pool ----------------------------------------------------


def joined(
    layouts: Sequence[Layout], batches: Sequence[Any], nothing: Mapping[int, float]
) -> Any:
    """Loader batches as one, in their order. Rows of several widths are padded.

    Args:
        layouts: of the batches.
        batches: with the same fields.
        nothing: the values, by the identity of a field, that do not count.

    Raises:
        TrainkitError: a field differs in a way in which no rows or columns do.
    """
    if any(each.rows.are_joined for each in layouts):
        raise TrainkitError(
            f"MicroBatching pool: documents that stand in one row have no padding that "
            f"a pool could save, received {describe(batches[0])}. Leave pool out; "
            f"Trainer(accumulate_grad_batches={len(batches)}) makes the same step."
        )
    paths = [[field.path for field in layout.fields] for layout in layouts]
    for each in paths:
        if each != paths[0]:
            raise _unlike(sorted({*each} ^ {*paths[0]}), batches)
    values = []
    for place, (path, first) in enumerate(layouts[0].fields):
        column: list[Any] = [layout.fields[place].value for layout in layouts]
        cuts = [layout.cuts[place] for layout in layouts]
        if all(cuts) and len({*cuts}) > 1:
            # Behind the last label there may be tokens, which the model sees.
            pads = padding_of(place, layouts, nothing, by_labels=False)
            most = max(map(int, cuts))  # type: ignore[arg-type]
            column = [widened(path, each, most, pads) for each in column]
        are_shared = {each is None for each in cuts}
        sizes = {
            each.shape[1:] if isinstance(each, Tensor) else None for each in column
        }
        if are_shared == {True} and all(are_equal(first, each) for each in column[1:]):
            values.append(first)
        elif are_shared == {False} and is_list(first):
            values.append(type(first)([row for each in column for row in each]))
        elif are_shared == {False} and len(sizes) == 1 and None not in sizes:
            values.append(torch.cat(column))
        else:
            raise _unlike(path, batches)
    return layouts[0].build(iter(values))


def _unlike(name: Any, batches: Sequence[Any]) -> TrainkitError:
    """An error for loader batches that cannot be put together."""
    return TrainkitError(
        f"MicroBatching pool: loader batches are joined, and of these {name!r} is not "
        f"alike: all must have the same fields, in which rows are lists, or tensors of "
        f"one size that only a mask or labels may change, and what rows share is "
        f"equal: {describe(batches[0])}, ..., {describe(batches[-1])}. Let the collate "
        f"function make them alike, or leave pool out."
    )


# ---- columns -------------------------------------------------------------------------


def padding_of(
    place: int,
    layouts: Sequence[Layout],
    nothing: Mapping[int, float],
    *,
    by_labels: bool = True,
) -> Any:
    """What the field at a place has where it pads, in one of these loader batches; what
    counts as nothing in it, if that is known of the first.

    Args:
        place: of the field.
        layouts: of the loader batches.
        nothing: the values, by the identity of a field, that do not count.
        by_labels: whether labels alone can tell where it pads.
    """
    path, value = layouts[0].fields[place]
    if id(value) in nothing:
        return nothing[id(value)]
    for layout in layouts:
        width, rows = layout.cuts[place] or 0, layout.rows
        if width in rows.by_labels and not by_labels:
            continue
        for row, (start, stop) in enumerate(rows.spans[width]):
            if stop < width or start > 0:
                column = stop if stop < width else 0
                return layout.fields[place].value[row, column]
    are_numbers = isinstance(value, Tensor) and value.is_floating_point()
    return IGNORED if "label" in path.lower() and not are_numbers else 0


def widened(path: str, value: Any, columns: int, pads: Any) -> Any:
    """The field at a path with so many columns."""
    if not isinstance(value, Tensor):
        raise TrainkitError(
            f"MicroBatching: field {path!r} must be a tensor of rows by columns to be "
            f"filled up (shapes=, pool=), received {describe(value)}. Make it one in "
            f"the collate function."
        )
    made = value.new_empty((len(value), columns, *value.shape[2:]))
    made[:, : value.shape[1]] = value
    made[:, value.shape[1] :] = torch.as_tensor(pads, dtype=value.dtype)
    return made
