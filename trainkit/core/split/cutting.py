"""Loader batches, cut into micro-batches."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainkit.core.batches import describe
from trainkit.core.split.fields import Field
from trainkit.core.split.layout import Layout, LayoutReader
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.split.partition import (
    Span,
    columns_of,
    even_runs,
    most_rows,
    partition,
)
from trainkit.core.split.rows import Rows
from trainkit.core.split.samples import rows_of_samples
from trainkit.core.split.slicing import slices_of
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
        whole: the loader batch's rows, if columns of it were left out.
    """

    batch: Any
    rows: list[int]
    padded: int
    real: int
    whole: Rows | None = None

    @property
    def columns(self) -> list[tuple[int, Span]]:
        """For each group of ragged tensors, the loader batch's padded length and the
        columns that a trimmed tensor has left."""
        if self.whole is None or not self.whole.has_lengths:
            return []
        lengths = [group.padded_length for group in self.whole.groups]
        return list(zip(lengths, columns_of(self.whole.spans, self.rows), strict=True))

    @property
    def trimmed(self) -> int:
        """How many more tokens it would compute if nothing were left out."""
        if self.whole is None:
            return 0
        wide = sum(group.padded_length for group in self.whole.groups)
        return wide * len(self.rows) - self.padded


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
        has_trimmed_left: whether columns on the left have been left out so far, so that
            a micro-batch's columns have other numbers than in the batch.
        shared: the fields of the last batch that every micro-batch gets whole.
    """

    def __init__(self, options: MicroBatching, strategy: AccumulationStrategy) -> None:
        self._options = options
        self._reader = LayoutReader(options, strategy)
        self.longest_over_budget: int | None = None
        self.has_trimmed_left = False
        self.shared: list[Field] = []
        self._measured: tuple[Any, Layout] | None = None  # until it is cut

    def measure(self, batch: Any) -> Rows:
        """How many rows a batch has, and how long they are."""
        if self._options.collate is not None:
            return rows_of_samples(batch, self._options)
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
            rows = rows_of_samples(batch, self._options)
            parts = self._parts(batch, rows, limit, at_least)
            batches = [collate([batch[row] for row in part]) for part in parts]
            return _micro_batches(batches, parts, rows)
        layout = self._read(batch)
        self.shared = [f for i, f in enumerate(layout.fields) if i not in layout.cut]
        if not trim:
            layout = layout.untrimmed()
        parts = self._parts(batch, layout.rows, limit, at_least)
        if not self.has_trimmed_left and layout.trims and layout.rows.begin_late:
            spans = layout.rows.spans
            firsts = (first for rows in parts for first, _ in columns_of(spans, rows))
            self.has_trimmed_left = any(firsts)
        cut = _micro_batches(_built(layout, parts), parts, layout.rows)
        for micro_batch in cut if layout.trims else ():
            micro_batch.whole = layout.rows
        return cut

    def pair(self, batch: Any, rows: list[int]) -> list[Any]:
        """Some rows of a loader batch as one micro-batch, trimmed and untrimmed."""
        layout = self._reader.read(batch)
        return [_built(each, [rows])[0] for each in (layout, layout.untrimmed())]

    def _read(self, batch: Any) -> Layout:
        measured, self._measured = self._measured, None
        if measured is not None and measured[0] is batch:
            return measured[1]
        return self._reader.read(batch)

    def _parts(
        self, batch: Any, rows: Rows, limit: Limit, at_least: int
    ) -> list[list[int]]:
        self.longest_over_budget = None
        if limit.tokens is not None and rows.num_rows:
            if not rows.has_lengths:
                raise TrainkitError(_no_lengths(batch, limit.tokens))
            self.longest_over_budget = rows.longest_over(limit.tokens)
        if not rows.has_lengths or rows.are_alike:
            length = rows.padded_of([0]) if rows.has_lengths else 1
            most = most_rows(length, limit.size, limit.tokens, rows.num_rows)
            return _even_parts(rows.num_rows, most, at_least)
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


def _built(layout: Layout, parts: Sequence[Sequence[int]]) -> list[Any]:
    pieces = slices_of(layout, parts)
    return [layout.build(iter(values)) for values in zip(*pieces, strict=True)]


def _even_parts(num_rows: int, most: int, at_least: int) -> list[list[int]]:
    """Parts that keep the order of the rows, so that slices copy nothing."""
    num_parts = max(1, min(num_rows, max(-(-num_rows // most), at_least)))
    return [list(range(a, b)) for a, b in even_runs(num_rows, num_parts)]


def _halved(parts: list[list[int]], rows: Rows, at_least: int) -> list[list[int]]:
    """Halve the largest micro-batch until there are enough."""
    missing = min(at_least, rows.num_rows) - len(parts)
    if missing <= 0:
        return parts
    numbers = itertools.count()  # the order of parts of one size
    heap = [(-rows.padded_of(part), next(numbers), part) for part in parts]
    whole = [entry for entry in heap if len(entry[2]) == 1]  # cannot be halved
    heap = [entry for entry in heap if len(entry[2]) > 1]
    heapq.heapify(heap)
    for _ in range(missing):
        _, _, part = heapq.heappop(heap)
        middle = (len(part) + 1) // 2
        for half in (part[:middle], part[middle:]):
            entry = (-rows.padded_of(half), next(numbers), half)
            if len(half) > 1:
                heapq.heappush(heap, entry)
            else:
                whole.append(entry)
    return [part for _, _, part in [*heap, *whole]]


def _micro_batches(
    batches: Sequence[Any], parts: Sequence[list[int]], rows: Rows
) -> list[MicroBatch]:
    if rows.are_alike and rows.num_rows:
        each = rows.padded_of([0])
        sizes = [each * len(part) for part in parts]
    else:
        sizes = [rows.padded_of(part) for part in parts]
    return [
        MicroBatch(batch, part, size, rows.real_of(part))
        for batch, part, size in zip(batches, parts, sizes, strict=True)
    ]


def _no_lengths(batch: Any, tokens: int) -> str:
    return (
        f"MicroBatching tokens={tokens}: a budget of tokens needs the rows' lengths, "
        f"and nothing in the batch tells them: {describe(batch)}. Name a mask or "
        f"lengths: MicroBatching(tokens={tokens}, lengths='path.to.mask'); or cut by "
        f"rows: MicroBatching(size=...)."
    )
