"""Loader batches, cut into micro-batches."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainkit.core.nested import Field, describe
from trainkit.core.split.layout import Layout, LayoutReader
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.split.partition import (
    Span,
    columns_of,
    even_runs,
    most_rows,
    partition,
)
from trainkit.core.split.rows import Rows, rows_of_samples
from trainkit.core.strategies import AccumulationStrategy
from trainkit.errors import TrainkitError


@dataclass(frozen=True)
class Limit:
    """The most rows, the most padded tokens, or both, in a micro-batch."""

    size: int | None = None
    tokens: int | None = None


@dataclass
class MicroBatch:
    """A part of a loader batch.

    Attributes:
        batch: what `training_step` gets, on the host.
        rows: its rows of the loader batch, ascending.
        padded: how many tokens its forward pass computes, over all groups of ragged
            tensors; the number of its rows, if they have no lengths.
        real: how many of them are not padding.
        trimmed: how many more tokens it would compute if nothing were left out.
    """

    batch: Any
    rows: list[int]
    padded: int
    real: int
    trimmed: int = 0


class Cutter:
    """Cuts loader batches, each row into exactly one micro-batch.

    >>> import torch
    >>> from trainkit.core.strategies import PerSample
    >>> cutter = Cutter(MicroBatching(size=4), PerSample())
    >>> [micro.rows for micro in cutter.cut(torch.zeros(6, 2))]
    [[0, 1, 2], [3, 4, 5]]

    Args:
        options: how to cut.
        strategy: its labels tell the rows' lengths where nothing else does.

    Attributes:
        longest_over_budget: the length of the longest row that exceeded the token
            budget of the last cut by itself, and so has a micro-batch of its own; None
            if every row fitted.
        shared: the fields of the last batch that every micro-batch gets whole.
    """

    def __init__(self, options: MicroBatching, strategy: AccumulationStrategy) -> None:
        self._options = options
        self._reader = LayoutReader(options, strategy)
        self.longest_over_budget: int | None = None
        self.shared: list[Field] = []
        self._measured: tuple[Any, Layout] | None = None  # until it is cut

    def has_padding(self, batch: Any) -> bool | None:
        """Whether some rows of a loader batch have columns that only pad; None if
        nothing tells their lengths."""
        if self._options.collate is not None:
            return None
        groups = self._reader.read(batch).rows.groups
        return any(group.has_padding for group in groups) if groups else None

    def measure(self, batch: Any) -> Rows:
        """How many rows a batch has, and how long they are."""
        if self._options.collate is not None:
            return rows_of_samples(batch, self._options.length_paths)
        self._measured = batch, self._reader.read(batch)
        return self._measured[1].rows

    def cut(
        self,
        batch: Any,
        limit: Limit | None = None,
        *,
        at_least: int = 1,
        trim: bool = True,
    ) -> list[MicroBatch]:
        """Cut a loader batch, the largest micro-batch first.

        If the first fits in memory, so do the rest.

        Args:
            batch: the loader batch; it is not changed.
            limit: what a micro-batch may hold. Default: what the options say.
            at_least: the fewest micro-batches: the largest are halved until there are
                so many, or as many as rows.
            trim: leave out columns that are padding, if the options say so.

        Raises:
            TrainkitError: the batch cannot be cut; the text shows its structure.
        """
        if limit is None:
            limit = Limit(self._options.size, self._options.tokens)
        collate = self._options.collate
        if collate is not None:
            rows = self.measure(batch)
            parts = self._parts(batch, rows, limit, at_least)
            batches = [collate([batch[row] for row in part]) for part in parts]
            return _micro_batches(batches, parts, rows)
        measured, self._measured = self._measured, None
        is_read = measured is not None and measured[0] is batch
        layout = measured[1] if measured and is_read else self._reader.read(batch)
        self.shared = [f for i, f in enumerate(layout.fields) if i not in layout.cut]
        layout = layout if trim else layout.untrimmed()
        parts = self._parts(batch, layout.rows, limit, at_least)
        cut = _micro_batches(_built(layout, parts), parts, layout.rows)
        wide = sum(group.padded_length for group in layout.rows.groups)
        for each in cut if layout.trims else ():
            each.trimmed = wide * len(each.rows) - each.padded
        return cut

    def pair(self, batch: Any, rows: list[int]) -> list[Any]:
        """Some rows of a loader batch as one micro-batch, trimmed and untrimmed."""
        layout = self._reader.read(batch)
        return [_built(each, [rows])[0] for each in (layout, layout.untrimmed())]

    def _parts(
        self, batch: Any, rows: Rows, limit: Limit, at_least: int
    ) -> list[list[int]]:
        self.longest_over_budget = None
        if limit.tokens is not None and rows.num_rows:
            if not rows.has_lengths:
                raise TrainkitError(_no_lengths(batch, limit.tokens))
            longest = max(map(sum, zip(*(g.lengths for g in rows.groups), strict=True)))
            self.longest_over_budget = longest if longest > limit.tokens else None
        if not rows.has_lengths or rows.are_alike:
            length = rows.padded_of([0]) if rows.has_lengths else 1
            most = most_rows(length, limit.size, limit.tokens, rows.num_rows)
            number = max(
                1, min(rows.num_rows, max(-(-rows.num_rows // most), at_least))
            )
            # In the order of the rows, so that slices copy nothing.
            return [list(range(a, b)) for a, b in even_runs(rows.num_rows, number)]
        parts = partition(
            rows.spans,
            size=limit.size,
            tokens=limit.tokens,
            overhead=self._options.overhead,
            attention=self._options.attention,
        )
        parts = _halved(parts, rows, at_least)
        parts.sort(key=rows.padded_of, reverse=True)
        return [sorted(part) for part in parts]


def _halved(parts: list[list[int]], rows: Rows, at_least: int) -> list[list[int]]:
    """Halve the largest micro-batch until there are enough."""
    numbers = itertools.count()  # the order of parts of one size
    heap = [(len(p) == 1, -rows.padded_of(p), next(numbers), p) for p in parts]
    heapq.heapify(heap)  # those of a single row come last
    while len(heap) < at_least and not heap[0][0]:
        *_, part = heapq.heappop(heap)
        middle = (len(part) + 1) // 2
        for half in (part[:middle], part[middle:]):
            key = len(half) == 1, -rows.padded_of(half), next(numbers)
            heapq.heappush(heap, (*key, half))
    return [part for *_, part in heap]


def _micro_batches(
    batches: Sequence[Any], parts: Sequence[list[int]], rows: Rows
) -> list[MicroBatch]:
    return [
        MicroBatch(batch, part, rows.padded_of(part), rows.real_of(part))
        for batch, part in zip(batches, parts, strict=True)
    ]


def _built(layout: Layout, parts: Sequence[Sequence[int]]) -> list[Any]:
    """A batch of each part's rows, without the columns that are padding in all."""
    sizes, pieces = _sizes_in_order(parts, layout.rows.num_rows), []
    columns = [columns_of(layout.rows.spans, p) if layout.trims else [] for p in parts]
    for number, (_, value) in enumerate(layout.fields):
        trims = layout.trims.get(number, ())
        if number not in layout.cut:
            pieces.append([value] * len(parts))
        elif sizes is not None and not trims and isinstance(value, Tensor):
            pieces.append(value.split(sizes))
        else:
            pieces.append(
                [
                    _piece(value, rows, [(dim, own[group]) for dim, group in trims])
                    for rows, own in zip(parts, columns, strict=True)
                ]
            )
    return [layout.build(iter(values)) for values in zip(*pieces, strict=True)]


def _sizes_in_order(parts: Sequence[Sequence[int]], num_rows: int) -> list[int] | None:
    """How many rows each micro-batch has, if together they are all rows in order."""
    in_order = [row for rows in parts for row in rows] == list(range(num_rows))
    return [len(rows) for rows in parts] if in_order else None


def _piece(value: Any, rows: Sequence[int], trims: Sequence[tuple[int, Span]]) -> Any:
    """A field's rows, without columns that are padding in all of them."""
    if isinstance(value, list | tuple):
        return type(value)([value[row] for row in rows])
    for dim, (first, stop) in trims:
        value = value[(slice(None),) * dim + (slice(first, stop),)]
    if not isinstance(value, Tensor):
        return value[list(rows)]  # an array
    in_order = not rows or rows[-1] - rows[0] + 1 == len(rows)
    if not in_order:
        return value.index_select(0, torch.tensor(rows, device=value.device))
    value = value[rows[0] : rows[-1] + 1] if rows else value[:0]
    # Models call view(), which works on a slice of rows but not of columns.
    return value.contiguous() if trims else value


def _no_lengths(batch: Any, tokens: int) -> str:
    return (
        f"MicroBatching tokens={tokens}: a budget of tokens needs the rows' lengths, "
        f"and nothing in the batch tells them: {describe(batch)}. Name a mask: "
        f"MicroBatching(tokens={tokens}, lengths='path.to.mask'); or cut by rows: "
        f"MicroBatching(size=...)."
    )
