"""Documents: where they lie in packed or flattened rows, and a batch of some of them.

Several documents may share a row of a batch: it is *packed*. Where all documents of a
batch stand in one row, without padding, it is *flattened*. What tells them apart is in
the batch: offsets (`cu_seq_lens_q`), numbers (`seq_idx`, or a mask of 1, 1, 2, 2), a
mask of blocks, or positions that begin anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainkit.core.document_fields import (
    KNOWN,
    MASKS,
    READERS,
    Read,
    begins_of,
    by_mask,
    by_offsets,
    reader_by_values,
    shape_beside,
    table_shape,
)
from trainkit.core.nested import (
    Field,
    describe,
    fields_of,
    is_dense,
    lookup,
    take_apart,
)
from trainkit.errors import TrainkitError


class Span(NamedTuple):
    """Where a document lies: its row, its first column, and the column behind it."""

    row: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of a batch.

    A document without a label that counts is padding, if others of its row have some.

    Attributes:
        by: the name of the field that tells them apart.
        numbers: for each token, row by row, the number of its document in the batch,
            from 1 on; 0 where it is padding.
        begun: the same, where padding has numbers as well.
    """

    by: str
    numbers: Tensor
    begun: Tensor

    @property
    def count(self) -> Tensor:
        """How many there are; nothing waits for it."""
        return (begins_of(self.numbers) & (self.numbers > 0)).sum()

    @cached_property
    def spans(self) -> list[Span]:
        """Where each lies, in order."""
        numbers, width = self.numbers.cpu(), self.numbers.shape[1]
        begins = begins_of(numbers).flatten().nonzero().flatten().tolist()
        found = []
        for begin, end in zip(begins, [*begins[1:], numbers.numel()], strict=True):
            row, start = divmod(begin, width)
            if numbers[row, start] > 0:
                found.append(Span(row, start, start + end - begin))
        return found

    @property
    def lengths(self) -> list[int]:
        """How many tokens each has."""
        return [span.stop - span.start for span in self.spans]

    def __str__(self) -> str:
        return f"by {self.by}, {len(self.spans)} in the first batch"


# ---- where they are ------------------------------------------------------------------


def find_documents(batch: Any, how: str = "auto") -> Documents | None:
    """The documents of a batch; None if nothing in it tells them apart.

    Nothing waits for a value on a device.

    Args:
        batch: any nesting of tensors.
        how: the path of the field that tells them apart; `"auto"` looks for those that
            transformers, its collators and common training code use; `"off"` for none.

    Raises:
        TrainkitError: the field that is named tells nothing of documents.
    """
    if how == "off" or how == "auto" and not _may_tell(batch):
        return None
    fields = _fields(batch)
    if how != "auto":
        return _named(batch, how, fields)
    for field, read in _telling(fields):
        begins = read(field.value, fields)
        if begins is not None:
            return _without_padding(field.path, begins, fields)
    return None


def documents_option(*of: Any) -> str:
    """What tells documents apart, as the first of a cut or of strategies says it."""
    said = (getattr(each, "documents", "auto") for each in of)
    return next((how for how in said if how != "auto"), "auto")


def find_flattened(batch: Any, how: str = "auto") -> Documents | None:
    """The documents between which a batch is cut; None if its rows are cut.

    By itself only a batch of one row is taken apart. Others are looked at no further.

    Args:
        batch: any nesting of tensors, on the host.
        how: as for `find_documents`.

    Raises:
        TrainkitError: offsets lead into several rows at once, so no part has its own.
    """
    if how != "auto":
        return find_documents(batch, how)
    if not _may_tell(batch):
        return None
    fields = _fields(batch)
    first, read = next(_telling(fields), (None, None))
    if first is None or first.value.ndim > 1 and len(first.value) > 1:
        return None
    if read is by_offsets and (shape_beside(first.value, fields) or (1,))[0] > 1:
        raise TrainkitError(
            f"{first.path}: offsets must lead into one row, (1, tokens), or have a row "
            f"for each, and these lead into several rows: {describe(batch)}. A part of "
            f"the rows would keep all of them. Make one row of the batch in the "
            f"collate function, as PackCollate does."
        )
    found = find_documents(batch)
    if found is None or len(found.numbers) > 1:
        return None
    is_mask = found.by.rpartition(".")[2] in MASKS
    if is_mask and len(found.spans) == 1:
        return None
    # Where a field has an entry for each that has begun, none of them is padding.
    number, width = int(found.begun.max()), found.numbers.shape[1]
    parts = take_apart(batch, lambda path, value: type(value) is list)[0]
    known = [v for _, v in parts if type(v) is list or is_dense(v) and v.ndim]
    sizes = set(map(len, known))
    is_whole = number in sizes - {1, width}
    return replace(found, numbers=found.begun) if is_whole else found


def count_documents(batch: Any, how: str = "auto") -> Tensor | None:
    """How many documents a batch has, on its device; None if nothing tells them apart.

    Args:
        batch: any nesting of tensors.
        how: as for `find_documents`.
    """
    if how == "auto" and not _may_tell(batch):
        return None
    first = next(_telling(_fields(batch)), None) if how == "auto" else None
    if first is not None and first[1] is by_mask and first[0].value.ndim == 2:
        numbers = first[0].value.long()  # of nearly every padded batch: 1, 1, 1, 0
        return numbers.amax(1).clamp_min(1).sum()
    found = find_documents(batch, how)
    return None if found is None else found.count


def _may_tell(batch: Any) -> bool:
    """Whether a batch has a field of a name that tells, or fields within fields."""
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
        number = 0
        for each in batch:
            if not isinstance(each, Tensor):
                number += _may_tell(each)
        return number == 1  # several may be samples
    fields = fields_of(batch)
    if fields is None:
        return False
    if not KNOWN.isdisjoint(fields):
        return True
    return any(not isinstance(value, Tensor) for value in fields.values())


def _fields(batch: Any) -> list[Field]:
    return [each for each in take_apart(batch)[0] if is_dense(each.value)]


def _telling(fields: Sequence[Field]) -> Iterator[tuple[Field, Read]]:
    """Fields whose names say that they tell documents apart, the plainest first."""
    by_name = {each.path.rpartition(".")[2]: each for each in reversed(fields)}
    for names, read in READERS:
        yield from ((by_name[name], read) for name in names if name in by_name)


def _named(batch: Any, how: str, fields: Sequence[Field]) -> Documents:
    """Documents by the field at a path."""
    value, name = lookup(batch, how), how.rpartition(".")[2]
    if is_dense(value):
        known = next((read for names, read in READERS if name in names), None)
        read = known or reader_by_values(value, fields)
        begins = None if read is None else read(value, fields)
        if begins is not None:
            return _without_padding(how, begins, fields)
    raise TrainkitError(
        f"documents {how!r}: must be the path of offsets (0, 5, 9), of numbers (0, 0, "
        f"1, 1), of a mask (1, 1, 2, 2, or of blocks), or of positions that begin anew "
        f"(0, 1, 0, 1), with an entry for each token but for offsets, and leads to "
        f"{describe(value)} in the batch {describe(batch)}. Name such a field, or say "
        f"documents='off'."
    )


def _without_padding(by: str, begins: Tensor, fields: Sequence[Field]) -> Documents:
    """Documents by where they begin, but those in which nothing counts."""
    begins = begins.clone()
    begins[:, 0] = True
    raw = begins.flatten().cumsum(0).view_as(begins)
    counts = _what_counts(begins.shape, fields)
    numbers = raw
    if counts is not None:
        number = raw.numel() + 1
        of_each = torch.zeros(number, dtype=torch.long, device=raw.device)
        of_each = of_each.index_add(0, raw.flatten(), counts.flatten().long())
        numbers = raw * (of_each > 0)[raw]
        first = torch.where(raw == raw[:, :1], raw, 0)
        numbers = torch.where((numbers > 0).any(1, keepdim=True), numbers, first)
    return Documents(by, numbers, raw)


def _what_counts(shape: torch.Size, fields: Sequence[Field]) -> Tensor | None:
    """Which tokens have a label that counts, and are seen; None if nothing says."""
    counts, own = None, [f for f in fields if table_shape(f.value) == tuple(shape)]
    for field in own:
        if "label" in field.path.lower() and not field.value.is_floating_point():
            counts = field.value.view(shape) >= 0
            break
    for field in own:
        if field.path.rpartition(".")[2] in MASKS:
            seen = field.value.view(shape) != 0  # labels may pad with 0, or 255
            return seen if counts is None else counts & seen
    return counts
