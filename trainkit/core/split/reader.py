"""What becomes of each field of a batch: one declared rule.

A tensor, array or list as long as the batch has rows is cut. Everything else is shared
by all micro-batches, and so is what `shared=` names. A field that is cut and as wide as
a mask is trimmed to the columns that a micro-batch needs; whether the model computes
the same without the others is measured before training.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from trainkit.core.documents import documents_option, find_flattened
from trainkit.core.nested import (
    Field,
    describe,
    held_by,
    is_array,
    is_dense,
    is_list,
    leaves,
    length_of,
    lookup,
    take_apart,
)
from trainkit.core.samples import are_samples, own_count
from trainkit.core.split.flattening import Flattened
from trainkit.core.split.layout import Layout, Trims
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.split.rows import (
    Rows,
    groups_of,
    marks_of,
    rows_of_samples,
)
from trainkit.core.strategies import (
    AccumulationStrategy,
    PerSample,
    length_of_tensors,
)
from trainkit.errors import TrainkitError


class LayoutReader:
    """Reads batches, by names that do not change from one to the next.

    Args:
        options: where lengths are, what is shared, what else is ragged.
        strategy: knows how many rows there are, and which labels count.
    """

    def __init__(self, options: MicroBatching, strategy: AccumulationStrategy) -> None:
        self._options, self._strategy = options, strategy
        self._documents = documents_option(options, strategy)
        self._lengths = options.length_paths
        self._always: dict[str, bool] = {}  # by path

    def read(self, batch: Any) -> Layout:
        """Read one batch.

        Raises:
            TrainkitError: its number of rows is unclear; the text shows its structure.
        """
        options = self._options
        if (collate := options.collate) is not None:
            rows = rows_of_samples(batch, self._lengths)
            samples = [Field("", list(batch))]
            return Layout(samples, lambda values: collate(next(values)), [()], rows)
        documents = find_flattened(batch, self._documents)
        if documents is not None:
            whole = [lookup(batch, path) for path in options.shared]
            return Flattened.read([batch], [documents], whole)
        shared = self._shared(batch)
        rows = self._rows(batch, shared)
        num_rows = rows.num_rows
        widths = {group.padded_length: place for place, group in enumerate(rows.groups)}
        ragged = {id(lookup(batch, path)): d for path, d in options.ragged.items()}
        fields, build = take_apart(
            batch, lambda path, value: self._is_whole(path, value, num_rows, shared)
        )
        trims: list[Trims | None] = [None] * len(fields)
        for place, field in enumerate(fields):
            value = field.value
            if id(value) in shared:
                continue
            if (size := length_of(value)) is None:
                _check_divisible(field, batch)
            elif size == num_rows:
                of = field, ragged.get(id(value)), widths, batch
                trims[place] = self._trims(*of) if widths else ()
        layout = Layout(fields, build, trims, rows)
        return layout if options.trim else layout.untrimmed()

    def rows(self, batch: Any) -> Rows:
        """How many rows a collated batch has, and how long they are."""
        if find_flattened(batch, self._documents) is not None:
            return self.read(batch).rows
        return self._rows(batch, self._shared(batch))

    def _shared(self, batch: Any) -> set[int]:
        return {id(lookup(batch, path)) for path in self._options.shared}

    def _rows(self, batch: Any, shared: Collection[int]) -> Rows:
        strategy = self._strategy
        marks = marks_of(batch, self._lengths, strategy)
        if isinstance(strategy, PerSample) and strategy.size is not None:
            num_rows = int(strategy.weight(batch))
        else:
            num_rows = len(marks[0].counts) if marks else _rows_of(batch, shared)
        if self._options.lengths is None:
            marks = [each for each in marks if len(each.counts) == num_rows]
        return Rows(num_rows, groups_of(batch, marks, num_rows) if marks else ())

    def _is_whole(
        self, path: str, value: Any, num_rows: int, shared: Collection[int]
    ) -> bool:
        """Whether a container is shared, or is a list with one entry for each row.

        Two tensors in a list may be two fields, or two rows that hold a tensor each. A
        list whose length once differed from the number of rows holds fields.
        """
        if id(value) in shared or not is_list(value):
            return id(value) in shared
        if not path:
            return isinstance(self._strategy, PerSample) and self._strategy.size == ""
        fits = len(value) == num_rows
        if fits and path not in self._always:
            if num_rows < 2:
                return True  # which says nothing of the next batch
            if all(_lengths(each) == {num_rows} for each in value):
                raise TrainkitError(
                    f"MicroBatching: field {path!r} is a list of {num_rows} entries of "
                    f"{num_rows} rows each, and the batch has as many rows, so that it "
                    f"may be one of fields or one of rows: {describe(value)}. Put "
                    f"fields into a dict, or rows into one padded tensor; or begin "
                    f"with a batch of another size, after which it is known."
                )
        return self._is_always(path, fits)

    def _is_always(self, path: str, fits: bool) -> bool:
        """Whether a size fits, in this batch and in all before; else, by chance."""
        self._always[path] = fits and self._always.get(path, True)
        return self._always[path]

    def _trims(
        self,
        field: Field,
        named: Any,
        widths: Mapping[int, int],
        batch: Any,
    ) -> Trims:
        """The dimensions as wide as a mask: dimension 1, and those in `ragged=`. A
        field that once had another width is not trimmed where it has it by chance."""
        shape: Any = getattr(field.value, "shape", ())
        dims = set()
        for dim in named or ():
            size = shape[dim] if -len(shape) < dim < len(shape) else None
            if size not in widths:
                raise TrainkitError(
                    f"MicroBatching: dimension {dim} of field {field.path!r} is "
                    f"ragged, so it must be as long as the lengths say, "
                    f"{sorted(widths)}, but is {size}, in the batch {describe(batch)}. "
                    f"If dimension 1 is no sequence, say MicroBatching(ragged="
                    f"{{{field.path!r}: ()}}); to give every micro-batch all columns, "
                    f"trim=False."
                )
            dims.add(dim % len(shape))
        if len(shape) > 1 and named != ():
            dims |= {1} if self._is_always(field.path, shape[1] in widths) else set()
        return [(dim, widths[shape[dim]]) for dim in sorted(dims)]


def _rows_of(batch: Any, shared: Collection[int]) -> int:
    """The one leading length of a batch's tensors, or of its arrays.

    Raises:
        TrainkitError: there is none, or more than one.
    """
    if not shared and (number := length_of_tensors(batch)) is not None:
        return number
    found = _lengths(batch, shared)
    if len(found) == 1:
        return found.pop()
    for field in take_apart(batch, lambda path, value: id(value) in shared)[0]:
        if id(field.value) not in shared:
            _check_divisible(field, batch)
    has = f"has {sorted(found)}" if found else "has no tensor with rows"
    raise TrainkitError(
        f"MicroBatching: cannot tell the rows of the batch: its tensors must share one "
        f"leading dimension, but the batch {has}. The batch is {describe(batch)}. Name "
        f"what every micro-batch gets whole in shared=, or what has a row for each "
        f"sample: PerSample(size='path.to.it'). A list of samples is cut before it is "
        f"collated: MicroBatching(collate=your_collate_fn), and collate_fn=list for "
        f"the loader; or PerSample(size='') if training_step takes lists."
    )


def _lengths(batch: Any, shared: Collection[int] = ()) -> set[int]:
    """The leading lengths of a batch's tensors, or of its other arrays if it has no
    tensor. Those in lists of samples do not count."""

    def is_whole(value: Any) -> bool:
        may_be = isinstance(value, list) or is_list(value) and value is not batch
        return id(value) in shared or may_be and are_samples(value)

    found = [e for e in leaves(batch, is_whole) if is_array(e) and id(e) not in shared]
    of_tensors = {each.shape[0] for each in found if isinstance(each, Tensor)}
    return of_tensors or {each.shape[0] for each in found}


def _check_divisible(field: Field, batch: Any) -> None:
    """Refuse a field that may hold rows and that nothing says how to cut."""
    value, kind = field.value, type(field.value).__name__
    if isinstance(value, Tensor):
        is_known = is_dense(value)
        kind = "nested tensor" if value.is_nested else f"{value.layout} tensor"
    else:
        is_plain = isinstance(value, type) or not hasattr(value, "__dict__")
        is_known = is_plain or not held_by(value) and own_count(value) is None
    if not is_known:
        name = f"field {field.path!r}" if field.path else "the batch"
        raise TrainkitError(
            f"MicroBatching: {name} is a {kind}, whose rows cannot be told apart, in "
            f"the batch {describe(batch)}. Make it a dense tensor, a dict or a "
            f"dataclass; or let the loader yield lists of samples (collate_fn=list) "
            f"and name what makes a batch of them: collate=Batch.from_data_list for "
            f"torch_geometric, collate=dgl.batch; or name it in shared= if every "
            f"micro-batch is to have all of it."
        )
