"""Loader batches, cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trainkit.core.document_fields import KNOWN
from trainkit.core.documents import Documents, documents_option, find_flattened
from trainkit.core.nested import Field, describe, lookup
from trainkit.core.split.filling import (
    filled,
    joined,
    nothing_in,
    parts_in_shapes,
    refuse_rows_that_count,
    shape_for,
)
from trainkit.core.split.flattening import Flattened
from trainkit.core.split.layout import Layout, LayoutReader
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.split.partition import even_runs, first_fit, partition, spread
from trainkit.core.split.rows import Rows, rows_of_samples
from trainkit.core.strategies import (
    AccumulationStrategy,
    Strategies,
    length_of_tensors,
)
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
        num_fillers: how many rows only fill it; they are its last.
    """

    batch: Any
    rows: list[int]
    padded: int
    real: int
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
        strategies: of all terms; they say what counts nothing where something fills.
    """

    def __init__(
        self,
        options: MicroBatching,
        strategy: AccumulationStrategy,
        strategies: Strategies | None = None,
    ) -> None:
        self._options, self._strategies = options, strategies or {}
        self._reader = LayoutReader(options, strategy)
        self._documents = documents_option(options, strategy)
        self._limit = Limit(options.size, options.tokens)

    def read(self, batch: Any) -> Layout:
        """The fields of a batch, and how many rows it has: samples that are not
        collated yet, documents that stand in one row, or rows.

        Raises:
            TrainkitError: its number of rows is unclear; the text shows its structure.
        """
        layout = self._padded(batch)
        return layout if self._options.trim else layout.untrimmed()

    def _padded(self, batch: Any) -> Layout:
        """The layout of a batch, which knows the columns that pad."""
        options = self._options
        if (collate := options.collate) is not None:
            rows, samples = rows_of_samples(batch, options.length_paths), [*batch]
            fields = [Field("", samples)]
            return Layout(fields, lambda values: collate(next(values)), [()], rows)
        shared, length, documents = self._look(batch)
        if documents is not None:
            return Flattened.read(batch, documents, shared)
        return self._reader.read(batch, shared, length)

    def _look(self, batch: Any) -> tuple[frozenset[int], int | None, Documents | None]:
        """The identities of what every micro-batch gets whole, the one length of the
        tensors, if there is nothing else, and the documents, if these are cut."""
        shared = frozenset(id(lookup(batch, path)) for path in self._options.shared)
        length = length_of_tensors(batch)
        # Nearly every batch holds nothing but tensors, none of which has such a name.
        is_plain = length is not None and KNOWN.isdisjoint(
            batch if isinstance(batch, dict) else ()
        )
        if is_plain and self._documents == "auto":
            return shared, length, None
        return shared, length, find_flattened(batch, self._documents)

    def has_padding(self, batch: Any) -> bool | None:
        """Whether some rows of a loader batch have columns that only pad; None if
        nothing tells their lengths."""
        if self._options.collate is not None:
            return None
        shared, length, documents = self._look(batch)
        if documents is not None:
            return False
        rows = self._reader.rows(batch, shared, length)
        return rows != rows.untrimmed() if rows.groups else None

    def join(self, batches: Sequence[Any]) -> Any:
        """Loader batches of a pool as one, in their order.

        Raises:
            TrainkitError: a field differs in a way in which no rows or columns do.
        """
        if len(batches) == 1:
            return batches[0]
        if self._options.collate is not None:
            return [sample for each in batches for sample in each]
        layouts = [self._padded(each) for each in batches]
        return joined(layouts, batches, nothing_in(batches[0], self._strategies))

    def cut(
        self,
        batch: Any,
        limit: Limit | Callable[[Rows], Limit] | None = None,
        *,
        at_least: int = 1,
        trim: bool = True,
    ) -> list[MicroBatch]:
        """Cut a loader batch, the largest micro-batch first.

        If the first fits in memory, so do the rest.

        Args:
            batch: the loader batch; it is not changed.
            limit: what a micro-batch may hold, or what says it of the batch's rows.
                Default: what the options say.
            at_least: the fewest micro-batches: the largest are halved until there are
                so many, or as many as rows.
            trim: leave out columns that are padding, if the options say so.

        Raises:
            TrainkitError: the batch cannot be cut; the text shows its structure.
        """
        layout = self.read(batch)
        limit = limit(layout.rows) if callable(limit) else limit or self._limit
        if not trim and layout.rows.groups and self._options.collate is None:
            layout = layout.untrimmed()
        rows, cut = layout.rows, []
        few = limit.tokens is not None and self._options.shapes is not None
        nothing = nothing_in(batch, self._strategies) if few else {}
        for part in self.parts(batch, rows, limit, at_least, few):
            padded = real = len(part)
            if rows.groups:
                padded, real = rows.padded_of(part), rows.real_of(part)
            if not few:
                cut.append(MicroBatch(layout.of(part), part, padded, real))
                continue
            shape = shape_for(self._options, rows, part)
            missing = 0 if rows.are_joined else shape[0] - len(part)
            if missing:
                refuse_rows_that_count(self._strategies)
            made = filled(layout, part, shape, nothing)
            cut.append(MicroBatch(made, part, shape[0] * shape[1], real, missing))
        return cut

    def parts(
        self,
        batch: Any,
        rows: Rows,
        limit: Limit,
        at_least: int = 1,
        few: bool = False,
    ) -> list[list[int]]:
        """The rows of each micro-batch, the largest first.

        Args:
            batch: the loader batch, for errors.
            rows: all of its rows, or some of them.
            limit: what a micro-batch may hold.
            at_least: the fewest micro-batches.
            few: whether they are filled to few shapes.
        """
        size, tokens, number = limit.size, limit.tokens, rows.num_rows
        if tokens is not None and number and not rows.groups:
            raise TrainkitError(
                f"MicroBatching tokens={tokens}: a budget of tokens needs the rows' "
                f"lengths, and nothing in the batch tells them: {describe(batch)}. "
                f"Name a mask: MicroBatching(tokens={tokens}, lengths='path.to.mask'); "
                f"or cut by rows: MicroBatching(size=...)."
            )
        if not few and (not rows.groups or rows.are_alike):
            # In the order of the rows, so that slices copy nothing.
            most = size or number
            if tokens is not None and number:
                most = min(most, tokens // rows.padded_of([0]))
            number = max(1, min(number, max(-(-number // max(most, 1)), at_least)))
            return [list(range(*run)) for run in even_runs(rows.num_rows, number)]
        if few:
            parts = parts_in_shapes(self._options, rows)
        elif not rows.are_joined:
            parts = partition(rows.spans, size=size, tokens=tokens)
        elif tokens is not None:  # nothing is padded, so few are best
            parts = first_fit(rows.groups[0].lengths, tokens, size)
        else:
            parts = spread(rows.groups[0].lengths, size)
        while len(parts) < min(at_least, number):
            several = [part for part in parts if len(part) > 1]
            largest = max(several, key=rows.padded_of)
            parts.remove(largest)
            middle = (len(largest) + 1) // 2
            parts += [largest[:middle], largest[middle:]]
        return sorted(map(sorted, parts), key=rows.padded_of, reverse=True)
