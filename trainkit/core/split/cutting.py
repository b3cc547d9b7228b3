"""Loader batches, cut into micro-batches by one declared rule.

A tensor, array or list as long as the batch has rows, in this batch and all before, is
cut. Everything else is shared by all micro-batches, and so is what `shared=` names. A
field that is cut and as wide as a mask is trimmed to the columns that a micro-batch
needs; whether the model computes the same without the others is measured before
training.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from trainkit.core.documents import documents_option, find_flattened
from trainkit.core.nested import (
    Field,
    describe,
    is_list,
    length_of,
    lookup,
    take_apart,
)
from trainkit.core.split.filling import (
    filled,
    joined,
    nothing_in,
    parts_in_shapes,
    refuse_rows_that_count,
    shape_for,
)
from trainkit.core.split.flattening import Flattened
from trainkit.core.split.layout import (
    Layout,
    check_divisible,
    lengths_of,
    rows_of,
)
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.split.partition import even_runs, first_fit, partition, spread
from trainkit.core.split.rows import (
    MASK,
    Rows,
    marked_rows,
    marks_of,
    rows_of_samples,
)
from trainkit.core.strategies import (
    AccumulationStrategy,
    PerSample,
    PerToken,
    Strategies,
    length_of_tensors,
    plain_length,
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
        source: the number of its loader batch, where several are cut for one window.
    """

    batch: Any
    rows: list[int]
    padded: int
    real: int
    num_fillers: int = 0
    source: int = 0


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
        refuses_others: whether a field that had an entry for each row must keep so.

    Attributes:
        trim: whether columns that only pad are left out.
    """

    def __init__(
        self,
        options: MicroBatching,
        strategy: AccumulationStrategy,
        strategies: Strategies | None = None,
        *,
        refuses_others: bool = False,
    ) -> None:
        self._options, self._strategy = options, strategy
        self._refuses_others = refuses_others
        self._strategies, self.trim = strategies or {}, options.trim
        self._documents = documents_option(options, strategy)
        self._limit = Limit(options.size, options.tokens)
        self._has_marks = options.lengths is not None or isinstance(strategy, PerToken)
        self._always: dict[Any, bool] = {}  # of lists by path, else with a dimension

    def read(self, batch: Any) -> Layout:
        """The fields of a batch, and how many rows it has: samples that are not
        collated yet, documents that stand in one row, or rows.

        Raises:
            TrainkitError: its number of rows is unclear; the text shows its structure.
        """
        layout = self._padded(batch)
        is_whole = self.trim or self._options.collate is not None
        return layout if is_whole else layout.untrimmed()

    def _padded(self, batch: Any) -> Layout:
        """The layout of a batch, which knows the columns that pad."""
        options = self._options
        if (collate := options.collate) is not None:
            rows, samples = rows_of_samples(batch, options.length_paths), [*batch]
            fields = [Field("", samples)]
            return Layout(fields, lambda values: collate(next(values)), [0], rows)
        shared = self._shared(batch)
        if plain_length(batch, self._documents) is None:
            documents = find_flattened(batch, self._documents)
            if documents is not None:
                return Flattened.read(batch, documents, shared)
        rows = self._rows(batch, shared)
        fields, build = take_apart(batch, partial(self._is_whole, rows, shared))
        cuts: list[int | None] = []
        for field in fields:
            own, value = None, field.value
            if id(value) not in shared:
                size = length_of(value)
                if size is None:
                    check_divisible(field, batch)
                elif self._has_rows(field, size, rows.num_rows):
                    own = self._width(field, rows) if rows.spans else 0
            cuts.append(own)
        return Layout(fields, build, cuts, rows)

    def _shared(self, batch: Any) -> frozenset[int]:
        """The identities of what every micro-batch gets whole."""
        return frozenset(id(lookup(batch, path)) for path in self._options.shared)

    def _rows(self, batch: Any, shared: frozenset[int]) -> Rows:
        """How many rows a batch has, and how long they are."""
        strategy, marks = self._strategy, []
        if self._has_marks or isinstance(batch, Mapping) and MASK in batch:
            marks = marks_of(batch, self._options.length_paths, strategy)
        if isinstance(strategy, PerSample) and strategy.size is not None:
            number = int(strategy.weight(batch))
        elif marks:
            number = len(marks[0].counts)
        else:
            plain = None if shared else length_of_tensors(batch)
            number = rows_of(batch, shared) if plain is None else plain
        if not marks:
            return Rows(number)
        if self._options.lengths is None:
            marks = [each for each in marks if len(each.counts) == number]
        return marked_rows(batch, marks, number)

    def _is_whole(
        self, rows: Rows, shared: Collection[int], path: str, value: Any
    ) -> bool:
        """Whether a container is shared, or is a list with one entry for each row.

        Two tensors in a list may be two fields, or two rows that hold a tensor each. A
        list whose length once differed from the number of rows holds fields.
        """
        if id(value) in shared or not is_list(value):
            return id(value) in shared
        if not path:
            return isinstance(self._strategy, PerSample) and self._strategy.size == ""
        fits = len(value) == rows.num_rows
        if fits and path not in self._always:
            if rows.num_rows < 2:
                return True  # which says nothing of the next batch
            if all(lengths_of(each) == {rows.num_rows} for each in value):
                raise TrainkitError(
                    f"MicroBatching: field {path!r} is a list of {len(value)} entries "
                    f"of {len(value)} rows each, and the batch has as many rows, so "
                    f"that it may be one of fields or one of rows: {describe(value)}. "
                    f"Put fields into a dict, or rows into one padded tensor; or begin "
                    f"with a batch of another size, after which it is known."
                )
        return self._is_always(path, fits)

    def _has_rows(self, field: Field, size: int, num_rows: int) -> bool:
        """Whether a field has an entry for each row, in this batch and in all before.
        One row says nothing of the next batch."""
        key, fits = (field.path, 0), size == num_rows
        if self._refuses_others and not fits and self._always.get(key):
            raise TrainkitError(
                f"MicroBatching: field {field.path!r} had an entry for each row so "
                f"far, and has {size} for {num_rows} rows now, so it is not known "
                f"whose they are: {describe(field.value)}. Give it as a list with an "
                f"entry for each row, or name it in shared= if every micro-batch is to "
                f"get it whole."
            )
        if num_rows < 2:
            return fits and self._always.get(key, True)
        return self._is_always(key, fits)

    def _is_always(self, key: Any, fits: bool) -> bool:
        """Whether a size fits, in this batch and in all before; else, by chance."""
        self._always[key] = fits and self._always.get(key, True)
        return self._always[key]

    def _width(self, field: Field, rows: Rows) -> int:
        """How wide dimension 1 is, if rows have a length in so many columns; else 0. A
        field that once had another width is not trimmed where it has it by chance."""
        shape: Any = getattr(field.value, "shape", ())
        if len(shape) < 2:
            return 0
        fits = shape[1] in rows.spans
        return shape[1] if self._is_always((field.path, 1), fits) else 0

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
        self, batch: Any, limit: Limit | Callable[[Rows], Limit] | None = None
    ) -> list[MicroBatch]:
        """Cut a loader batch, the largest micro-batch first.

        If the first fits in memory, so do the rest.

        Args:
            batch: the loader batch; it is not changed.
            limit: what a micro-batch may hold, or what says it of the batch's rows.
                Default: what the options say.

        Raises:
            TrainkitError: the batch cannot be cut; the text shows its structure.
        """
        layout = self.read(batch)
        limit = limit(layout.rows) if callable(limit) else limit or self._limit
        rows, cut = layout.rows, []
        few = limit.tokens is not None and self._options.shapes is not None
        nothing = nothing_in(batch, self._strategies) if few else {}
        for part in self.parts(batch, rows, limit, few):
            padded = real = len(part)
            if rows.spans:
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
        self, batch: Any, rows: Rows, limit: Limit, few: bool = False
    ) -> list[list[int]]:
        """The rows of each micro-batch, the largest first.

        Args:
            batch: the loader batch, for errors.
            rows: all of its rows, or some of them.
            limit: what a micro-batch may hold.
            few: whether they are filled to few shapes.
        """
        size, tokens, number = limit.size, limit.tokens, rows.num_rows
        if tokens is not None and number and not rows.spans:
            raise TrainkitError(
                f"MicroBatching tokens={tokens}: a budget of tokens needs the rows' "
                f"lengths, and nothing in the batch tells them: {describe(batch)}. "
                f"Name a mask: MicroBatching(tokens={tokens}, lengths='path.to.mask'); "
                f"or cut by rows: MicroBatching(size=...)."
            )
        if not few and (not rows.spans or rows.are_alike):
            # In the order of the rows, so that slices copy nothing.
            most = size or number
            if tokens is not None and number:
                most = min(most, tokens // rows.padded_of([0]))
            runs = even_runs(number, max(1, -(-number // max(most, 1))))
            return [list(range(*run)) for run in runs]
        if few:
            parts = parts_in_shapes(self._options, rows)
        elif not rows.are_joined:
            parts = partition(rows.groups, size=size, tokens=tokens)
        elif tokens is not None:  # nothing is padded, so few are best
            parts = first_fit(rows.lengths, tokens, size)
        else:
            parts = spread(rows.lengths, size)
        return sorted(map(sorted, parts), key=rows.padded_of, reverse=True)
