"""Loader batches, cut into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainkit.core.nested import Field, describe
from trainkit.core.split.flattening import Flattened
from trainkit.core.split.layout import (
    Layout,
    Nothing,
    all_rows,
    nothing_in,
    parts_in_shapes,
    shape_for,
    unlike,
)
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.split.partition import (
    even_runs,
    first_fit,
    longest_first,
    most_rows,
    partition,
)
from trainkit.core.split.reader import LayoutReader
from trainkit.core.split.rows import Rows
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
        bare: the batch without what only fills its shape.
        num_fillers: how many rows only fill it; they are its last.
    """

    batch: Any
    rows: list[int]
    padded: int
    real: int
    bare: Any
    num_fillers: int = 0


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
        nothing: what a row or column must have in which nothing counts, if some fill.

    Attributes:
        longest_over_budget: the length of the longest row that exceeded the token
            budget of the last cut by itself, and so has a micro-batch of its own; None
            if every row fitted.
        shared: the fields of the last batch that every micro-batch gets whole.
    """

    def __init__(
        self,
        options: MicroBatching,
        strategy: AccumulationStrategy,
        nothing: Nothing | None = None,
    ) -> None:
        self._options, self._strategy = options, strategy
        self._nothing = nothing or {}
        self._reader = LayoutReader(options, strategy)
        self.longest_over_budget: int | None = None
        self.shared: list[Field] = []
        self._measured: tuple[Any, Layout] | None = None  # until it is cut

    def has_padding(self, batch: Any) -> bool | None:
        """Whether some rows of a loader batch have columns that only pad; None if
        nothing tells their lengths."""
        if self._options.collate is not None:
            return None
        rows = self._reader.rows(batch)
        return rows != rows.untrimmed() if rows.groups else None

    def measure(self, batch: Any) -> Rows:
        """How many rows a batch has, and how long they are."""
        self._measured = batch, self._reader.read(batch)
        return self._measured[1].rows

    def divided(self, batch: Any) -> list[str]:
        """The paths of the fields of which each micro-batch gets a part."""
        layout = self._reader.read(batch)
        pairs = zip(layout.fields, layout.trims, strict=True)
        return [field.path for field, trims in pairs if trims is not None]

    def join(self, batches: Sequence[Any]) -> Any:
        """Loader batches of a pool as one, in their order. Rows of several widths are
        padded; flattened batches are put one behind the other.

        Raises:
            TrainkitError: a field differs in a way in which no rows or columns do.
        """
        if len(batches) == 1:
            return batches[0]
        if self._options.collate is not None:
            return [sample for each in batches for sample in each]
        reader = LayoutReader(self._options, self._strategy)
        layouts = [reader.read(each) for each in batches]
        documents = [
            each.documents[0] for each in layouts if isinstance(each, Flattened)
        ]
        if len(documents) == len(batches):
            flat = Flattened.read(batches, documents)
            return flat.of(range(flat.rows.num_rows))
        if documents:
            raise unlike("documents", batches, "are told apart in some of them only")
        layouts = [each.untrimmed() for each in layouts]
        return all_rows(layouts, batches, nothing_in(batches[0], self._nothing))

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
        if self._measured is None or self._measured[0] is not batch:
            self.measure(batch)
        assert self._measured is not None
        layout, self._measured = self._measured[1], None
        pairs = zip(layout.fields, layout.trims, strict=True)
        self.shared = [field for field, trims in pairs if trims is None]
        if not trim and layout.rows.groups and self._options.collate is None:
            layout = layout.untrimmed()
        limit = limit or Limit(self._options.size, self._options.tokens)
        rows, cut = layout.rows, []
        few = limit.tokens is not None and self._options.shapes is not None
        nothing = nothing_in(batch, self._nothing) if few else {}
        for part in self.parts(batch, rows, limit, at_least, few):
            padded = real = len(part)
            if rows.groups:
                padded, real = rows.padded_of(part), rows.real_of(part)
            bare = layout.of(part)
            micro = MicroBatch(bare, part, padded, real, bare)
            if few:
                shape = shape_for(self._options, rows, part)
                micro.batch = layout.filled(part, shape, nothing)
                micro.padded = shape[0] * shape[1]
                micro.num_fillers = 0 if rows.are_joined else shape[0] - len(part)
            cut.append(micro)
        return cut

    def pair(self, batch: Any, rows: list[int]) -> list[Any]:
        """Some rows of a loader batch as one micro-batch, trimmed and untrimmed."""
        layout = self._reader.read(batch)
        return [layout.of(rows), layout.untrimmed().of(rows)]

    def parts(
        self,
        batch: Any,
        rows: Rows,
        limit: Limit,
        at_least: int = 1,
        few: bool = False,
    ) -> list[list[int]]:
        """The rows of each micro-batch.

        Args:
            batch: the loader batch, for errors.
            rows: all of its rows, or some of them.
            limit: what a micro-batch may hold.
            at_least: the fewest micro-batches.
            few: whether they are filled to few shapes.
        """
        if limit.tokens is not None and rows.num_rows and not rows.has_lengths:
            raise TrainkitError(
                f"MicroBatching tokens={limit.tokens}: a budget of tokens needs the "
                f"rows' lengths, and nothing in the batch tells them: "
                f"{describe(batch)}. Name a mask: MicroBatching(tokens={limit.tokens}, "
                f"lengths='path.to.mask'); or cut by rows: MicroBatching(size=...)."
            )
        is_by_run = rows.are_alike and not rows.are_joined and not few
        if is_by_run:
            # In the order of the rows, so that slices copy nothing.
            number = rows.num_rows
            most = most_rows(rows.padded_of([0]), limit.size, limit.tokens, number)
            number = max(1, min(number, max(-(-number // most), at_least)))
            parts = [list(range(a, b)) for a, b in even_runs(rows.num_rows, number)]
        elif few:
            parts = parts_in_shapes(self._options, rows)
        elif rows.are_joined:
            parts = self._of_documents(rows, limit)
        else:
            parts = partition(
                rows.spans,
                size=limit.size,
                tokens=limit.tokens,
                overhead=self._options.overhead,
                attention=self._options.attention,
            )
        if not is_by_run:
            while len(parts) < min(at_least, rows.num_rows):
                several = [part for part in parts if len(part) > 1]
                largest = max(several, key=rows.padded_of)
                parts.remove(largest)
                middle = (len(largest) + 1) // 2
                parts += [largest[:middle], largest[middle:]]
            parts = [sorted(part) for part in parts]
            parts.sort(key=rows.padded_of, reverse=True)
        self.longest_over_budget = None
        if limit.tokens is not None and parts:
            first = rows.padded_of(parts[0])  # only a row by itself is over the budget
            self.longest_over_budget = first if first > limit.tokens else None
        return parts

    def _of_documents(self, rows: Rows, limit: Limit) -> list[list[int]]:
        """Documents that share micro-batches: nothing is padded, so few are best."""
        lengths = rows.groups[0].lengths
        if limit.tokens is not None:
            return first_fit(lengths, limit.tokens, limit.size)
        most = limit.size or rows.num_rows
        parts: list[list[int]] = [[] for _ in range(-(-rows.num_rows // most))]
        for place in longest_first(lengths):  # each where it is emptiest
            free = [part for part in parts if len(part) < most]
            min(free, key=rows.real_of).append(place)
        return parts
