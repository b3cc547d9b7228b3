"""Rows that are documents: batches of some of them, one behind the other in one row."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainkit.core.document_fields import (
    IGNORED,
    KNOWN,
    LONGEST,
    MASKS,
    NUMBERS,
    OFFSETS,
    are_offsets,
)
from trainkit.core.documents import Documents, find_documents
from trainkit.core.nested import describe, is_dense, take_apart
from trainkit.core.split.layout import Layout
from trainkit.core.split.rows import Rows
from trainkit.errors import TrainkitError


@dataclass(frozen=True)
class Flattened(Layout):
    """The documents of a loader batch.

    Offsets, numbers and greatest lengths are made anew. What has an entry for each
    token, or for each document, is cut. All else is shared.

    Attributes:
        documents: where they lie.
        whole: the identities of values that are shared all the same.
    """

    documents: Documents
    whole: frozenset[int]

    @classmethod
    def read(
        cls, batch: Any, documents: Documents, whole: frozenset[int] = frozenset()
    ) -> Flattened:
        """Read a loader batch in which documents were found."""
        fields, build = take_apart(batch, lambda path, v: isinstance(v, list))
        lengths = documents.lengths
        spans = {max(lengths): [(0, length) for length in lengths]}
        rows = Rows(len(lengths), spans, are_joined=True)
        read = cls(fields, build, (), rows, documents, whole)
        pairs = zip(fields, read.values([0]), strict=True)
        cuts = [None if made is field.value else 0 for field, made in pairs]
        return replace(read, cuts=cuts)

    def untrimmed(self) -> Layout:
        return self

    def values(self, rows: Sequence[int]) -> list[Any]:
        part = _Part(self.documents, rows)
        return [self._value(*field, part) for field in self.fields]

    def filled(self, rows: Sequence[int], tokens: int, nothing: Any) -> Any:
        """A batch of so many tokens: with one more document, in which nothing counts.
        It has no field whose size depends on how many documents it has."""
        missing = tokens - self.rows.real_of(rows)
        part = _Part(self.documents, rows, missing)
        values = []
        for path, given in self.fields:
            value = self._value(path, given, part)
            dim = self.dim_of_tokens(given) if is_dense(given) else None
            if dim is not None:
                are_labels = "label" in path.lower() and not given.is_floating_point()
                count = nothing.get(id(given), IGNORED if are_labels else None)
                if count is not None:
                    value = value.clone()
                    start = value.shape[dim] - missing
                    value[(slice(None),) * dim + (slice(start, None),)] = count
            values.append(value)
        made = self.build(iter(values))
        if isinstance(made, MutableMapping):
            for name in (*OFFSETS, *LONGEST):
                made.pop(name, None)
        by = self.documents.by
        name = by.rpartition(".")[2]
        if name not in KNOWN or name in OFFSETS and find_documents(made) is None:
            raise TrainkitError(
                f"MicroBatching shapes: documents must be told apart by a field with a "
                f"known name that has an entry for each token, such as position_ids or "
                f"seq_idx, beside which offsets are left out, and {by!r} does so. "
                f"PackCollate() has both."
            )
        return made

    def _value(self, path: str, value: Any, part: _Part) -> Any:
        """What a field has for the documents of a part."""
        name, number = path.rpartition(".")[2], len(self.documents.spans)
        if id(value) in self.whole:
            return value
        if name in LONGEST:
            longest = int(part.lengths.max())
            return torch.full_like(value, longest) if is_dense(value) else longest
        if not is_dense(value):
            if not isinstance(value, list) or len(value) != number:
                return value
            return [value[place] for place in part.chosen]
        is_named = path == self.documents.by
        if name in OFFSETS or self._are_offsets(value, is_named=is_named):
            offsets = torch.cat([torch.zeros(1), part.lengths.cumsum(0)])
            return offsets.to(value).view(*[1] * (value.ndim - 1), -1)
        found = self._of_tokens(value, part, is_mask=is_named or "mask" in name)
        if found is None:
            is_one_each = value.ndim > 0 and len(value) == number
            return value[part.chosen] if is_one_each else value
        tells = is_named and bool(part.missing)
        is_mask = name in MASKS and found.ndim == 2 and (tells or bool(found.max() > 1))
        if name not in NUMBERS and not is_mask:
            return found
        is_padding = found < int(is_mask)
        return torch.where(is_padding, found, part.numbered(value, found))

    def _are_offsets(self, value: Tensor, *, is_named: bool) -> bool:
        """Whether these are offsets, of a name that nobody knows."""
        numbers = self.documents.numbers
        is_whole = is_named or value.numel() > 1 and int(value.max()) == numbers.numel()
        return is_whole and are_offsets(value, numbers.shape[1])

    def _of_tokens(self, value: Tensor, part: _Part, *, is_mask: bool) -> Tensor | None:
        """The entries for the part's tokens; None if there are none for tokens."""
        rows, width = self.documents.numbers.shape
        row, column = part.row, part.column
        if value.ndim > 2 and value.shape[-2:] == (width, width):
            if part.missing is not None:
                raise TrainkitError(
                    f"MicroBatching shapes: a mask of blocks, {describe(value)}, "
                    f"cannot be filled up. Let the model make it of position_ids or "
                    f"seq_idx."
                )
            if len(value) in (1, rows) and (value.ndim > 3 or is_mask):
                row_of = row[:, None] % len(value)
                blocks = value.movedim(0, -3)[..., row_of, column[:, None], column]
                # Documents of different rows do not see each other.
                is_own = (row[:, None] == row).to(value.device)
                return torch.where(is_own, blocks, value.min())[None]
            if rows == 1 and len(value) != 1:  # of each head
                return value[..., column[:, None], column]
        dim = self.dim_of_tokens(value)
        if dim == 1:
            return value.expand(rows, *value.shape[1:])[row, column][None]
        return None if dim is None else value[(slice(None),) * dim + (column,)]

    def dim_of_tokens(self, value: Tensor) -> int | None:
        """The dimension of a field in which the batch has its tokens."""
        (rows, width), shape = self.documents.numbers.shape, tuple(value.shape)
        if rows == 1 and shape[1:3] == (1, width):  # positions in several dimensions
            return 2
        if shape[:2] in ((rows, width), (1, width)):  # positions may be of all rows
            return 1
        return 0 if rows == 1 and shape[:1] == (width,) else None


class _Part:
    """Some documents of a loader batch.

    Args:
        documents: all of them.
        chosen: the places of some, ascending.
        missing: how many tokens one more document has, in which nothing counts; each of
            them is the first token again. None if nothing is filled up.

    Attributes:
        chosen: as a list.
        lengths: of the documents.
        row: for each token the row where it is.
        column: and the column.
    """

    def __init__(
        self, documents: Documents, chosen: Sequence[int], missing: int | None = None
    ) -> None:
        self.chosen, self.missing = list(chosen), missing
        spans = [documents.spans[place] for place in chosen]
        lengths = [span.stop - span.start for span in spans]
        rows = torch.tensor([span.row for span in spans])
        self.row = rows.repeat_interleave(torch.tensor(lengths))
        self.column = torch.cat([torch.arange(s.start, s.stop) for s in spans])
        if missing:
            lengths.append(missing)
            self.row = torch.cat([self.row, self.row[:1].expand(missing)])
            self.column = torch.cat([self.column, self.column[:1].expand(missing)])
        self.lengths = torch.tensor(lengths)

    def numbered(self, value: Tensor, found: Tensor) -> Tensor:
        """Numbers from a field's first one on, without a gap."""
        first = value.flatten()[0].clamp_min(0)
        anew = torch.arange(len(self.lengths)).repeat_interleave(self.lengths)
        return (anew.to(first.device) + first).to(value.dtype).view_as(found)
