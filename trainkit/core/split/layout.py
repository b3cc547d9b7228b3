"""The fields of a batch, and batches of some of its rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainkit.core.nested import (
    Build,
    Field,
    describe,
    held_by,
    is_array,
    is_dense,
    is_list,
    leaves,
    take_apart,
)
from trainkit.core.samples import are_samples, own_count
from trainkit.core.split.partition import Span, columns_of
from trainkit.core.split.rows import Rows
from trainkit.errors import TrainkitError


@dataclass(frozen=True)
class Layout:
    """The fields of a batch, and what becomes of each.

    Attributes:
        fields: its parts, in order.
        build: makes a batch from as many other values.
        cuts: of each field None if it is shared; the width by which it is trimmed, or 0
            where only its rows are cut.
        rows: of the batch.
    """

    fields: Sequence[Field]
    build: Build
    cuts: Sequence[int | None]
    rows: Rows

    @property
    def divided(self) -> list[str]:
        """The paths of the fields of which each micro-batch gets a part."""
        pairs = zip(self.fields, self.cuts, strict=True)
        return [field.path for field, cut in pairs if cut is not None]

    @property
    def shared(self) -> list[Field]:
        """The fields that every micro-batch gets whole."""
        pairs = zip(self.fields, self.cuts, strict=True)
        return [field for field, cut in pairs if cut is None]

    def untrimmed(self) -> Layout:
        """A copy of this layout that gives every micro-batch all columns."""
        return replace(self, rows=self.rows.untrimmed())

    def of(self, rows: Sequence[int]) -> Any:
        """A batch of some rows, ascending, without the columns that pad in all."""
        return self.build(iter(self.values(rows)))

    def values(self, rows: Sequence[int]) -> list[Any]:
        """The fields of such a batch; its last row may be there several times."""
        columns = dict[Any, Span]()
        if spans := self.rows.spans:
            found = columns_of([*spans.values()], rows)
            columns = dict(zip(spans, found, strict=True))
        index, values = list(rows), list[Any]()
        first = index[0] if index else 0
        is_run = index == list(range(first, first + len(index)))
        where = None if is_run else torch.tensor(index)
        for (_, value), cut in zip(self.fields, self.cuts, strict=True):
            if cut:
                start, stop = columns[cut]
                if stop - start < cut:
                    value = value[:, start:stop]
            if cut is None:
                values.append(value)
            elif isinstance(value, list | tuple):
                values.append(type(value)([value[row] for row in index]))
            elif not isinstance(value, Tensor):
                values.append(value[index])  # an array
            elif where is not None:
                values.append(value.index_select(0, where.to(value.device)))
            else:
                value = value[first : first + len(index)]
                # Models call view(), which works on a slice of rows but not of columns.
                values.append(value.contiguous() if cut else value)
        return values


def rows_of(batch: Any, shared: Collection[int]) -> int:
    """The one leading length of a batch's tensors, or of its arrays.

    Raises:
        TrainkitError: there is none, or more than one.
    """
    found = lengths_of(batch, shared)
    if len(found) == 1:
        return found.pop()
    for field in take_apart(batch, lambda path, value: id(value) in shared)[0]:
        if id(field.value) not in shared:
            check_divisible(field, batch)
    has = f"has {sorted(found)}" if found else "has no tensor with rows"
    raise TrainkitError(
        f"MicroBatching: cannot tell the rows of the batch: its tensors must share one "
        f"leading dimension, but the batch {has}. The batch is {describe(batch)}. Name "
        f"what every micro-batch gets whole in shared=, or what has a row for each "
        f"sample: PerSample(size='path.to.it'). A list of samples is cut before it is "
        f"collated: MicroBatching(collate=your_collate_fn), and collate_fn=list for "
        f"the loader; or PerSample(size='') if training_step takes lists."
    )


def lengths_of(batch: Any, shared: Collection[int] = ()) -> set[int]:
    """The leading lengths of a batch's tensors, or of its other arrays if it has no
    tensor. Those in lists of samples do not count."""

    def is_whole(value: Any) -> bool:
        may_be = isinstance(value, list) or is_list(value) and value is not batch
        return id(value) in shared or may_be and are_samples(value)

    found = [e for e in leaves(batch, is_whole) if is_array(e) and id(e) not in shared]
    of_tensors = {each.shape[0] for each in found if isinstance(each, Tensor)}
    return of_tensors or {each.shape[0] for each in found}


def check_divisible(field: Field, batch: Any) -> None:
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
