"""Rows that are documents: batches of some of them, one behind the other in one row."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
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
from trainkit.core.nested import Field, are_equal, describe, is_dense, take_apart
from trainkit.core.split.layout import Layout
from trainkit.core.split.rows import Group, Rows
from trainkit.errors import TrainkitError


@dataclass(frozen=True)
class Flattened(Layout):
    """The documents of loader batches.

    Offsets, numbers and greatest lengths are made anew. What has an entry for each
    token, or for each document, is cut. All else is shared.

    Attributes:
        batches: the loader batches; several are put together.
        documents: of each of them.
        columns: each field with its values in all of them.
        whole: the identities of values that are shared all the same.
    """

    batches: Sequence[Any]
    documents: Sequence[Documents]
    columns: Sequence[tuple[str, list[Any]]]
    whole: frozenset[int]

    @classmethod
    def read(
        cls,
        batches: Sequence[Any],
        documents: Sequence[Documents],
        whole: frozenset[int] = frozenset(),
    ) -> Flattened:
        """Read loader batches in which documents were found."""
        by = documents[0].by
        is_known = by.rpartition(".")[2] in KNOWN
        if len(batches) > 1 and not (is_known and {d.by for d in documents} == {by}):
            raise unlike(by, batches, "must have a known name, such as position_ids")
        parts = [
            take_apart(each, lambda path, v: isinstance(v, list)) for each in batches
        ]
        lengths = [length for each in documents for length in each.lengths]
        group = Group(max(lengths), [(0, length) for length in lengths])
        rows = Rows(len(lengths), [group], are_joined=True)
        columns = alike([fields for fields, _ in parts], batches)
        fields, build = parts[0]
        read = cls(fields, build, (), rows, batches, documents, columns, whole)
        first = _Part(documents, [0])
        trims = [
            None if read._value(path, values, first) is values[0] else ()
            for path, values in columns
        ]
        return replace(read, trims=trims)

    def untrimmed(self) -> Layout:
        return self

    def values(self, rows: Sequence[int]) -> list[Any]:
        part = _Part(self.documents, rows)
        return [self._value(*column, part) for column in self.columns]

    def filled(self, rows: Sequence[int], tokens: int, nothing: Any) -> Any:
        """A batch of so many tokens: with one more document, in which nothing counts.
        It has no field whose size depends on how many documents it has."""
        missing = tokens - self.rows.real_of(rows)
        part = _Part(self.documents, rows, missing)
        values = []
        for path, column in self.columns:
            value, given = self._value(path, column, part), column[0]
            dim = self.dim_of_tokens(given, 0) if is_dense(given) else None
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
        by = self.documents[0].by
        name = by.rpartition(".")[2]
        if name not in KNOWN or name in OFFSETS and find_documents(made) is None:
            raise TrainkitError(
                f"MicroBatching shapes: documents must be told apart by a field with a "
                f"known name that has an entry for each token, such as position_ids or "
                f"seq_idx, beside which offsets are left out, and {by!r} does so. "
                f"PackCollate() has both."
            )
        return made

    def _value(self, path: str, values: list[Any], part: _Part) -> Any:
        """What a field has for the documents of a part."""
        name, first = path.rpartition(".")[2], values[0]
        if id(first) in self.whole:
            return the_same(path, values, self.batches)
        if name in LONGEST:
            longest = int(part.lengths.max())
            return torch.full_like(first, longest) if is_dense(first) else longest
        sizes = [len(each.spans) for each in self.documents]
        pairs = list(zip(values, part.chosen, strict=True))
        if not all(map(is_dense, values)):
            if [len(v) if isinstance(v, list) else None for v in values] == sizes:
                return [value[place] for value, chosen in pairs for place in chosen]
            return the_same(path, values, self.batches)
        is_named = path == self.documents[0].by
        if name in OFFSETS or self._are_offsets(first, is_named=is_named):
            offsets = torch.cat([torch.zeros(1), part.lengths.cumsum(0)])
            return offsets.to(first).view(*[1] * (first.ndim - 1), -1)
        found = self._of_tokens(values, part, is_mask=is_named or "mask" in name)
        if found is None:
            if [len(each) if each.ndim else None for each in values] == sizes:
                return torch.cat([value[chosen] for value, chosen in pairs])
            return the_same(path, values, self.batches)
        tells = is_named and (bool(part.missing) or len(values) > 1)
        is_mask = name in MASKS and found.ndim == 2 and (tells or bool(found.max() > 1))
        if name not in NUMBERS and not is_mask:
            return found
        is_padding = found < int(is_mask)
        return torch.where(is_padding, found, part.numbered(first, found))

    def _are_offsets(self, value: Tensor, *, is_named: bool) -> bool:
        """Whether these are offsets, of a name that nobody knows."""
        numbers = self.documents[0].numbers
        is_whole = is_named or value.numel() > 1 and int(value.max()) == numbers.numel()
        return is_whole and are_offsets(value, numbers.shape[1])

    def _of_tokens(
        self, values: list[Tensor], part: _Part, *, is_mask: bool
    ) -> Tensor | None:
        """The entries for the part's tokens; None if there are none for tokens."""
        value, (rows, width) = values[0], self.documents[0].numbers.shape
        if value.ndim > 2 and value.shape[-2:] == (width, width):
            if part.missing is not None or len(values) > 1:
                what = "pool" if part.missing is None else "shapes"
                raise TrainkitError(
                    f"MicroBatching {what}: a mask of blocks, {describe(value)}, "
                    f"cannot be joined or filled up. Let the model make it of "
                    f"position_ids or seq_idx."
                )
            row, column = part.rows[0], part.columns[0]
            if len(value) in (1, rows) and (value.ndim > 3 or is_mask):
                row_of = row[:, None] % len(value)
                blocks = value.movedim(0, -3)[..., row_of, column[:, None], column]
                # Documents of different rows do not see each other.
                is_own = (row[:, None] == row).to(value.device)
                return torch.where(is_own, blocks, value.min())[None]
            if rows == 1 and len(value) != 1:  # of each head
                return value[..., column[:, None], column]
        dims = [self.dim_of_tokens(each, number) for number, each in enumerate(values)]
        dim = dims[0]
        if dim is None or {*dims} != {dim}:
            return None
        found = []
        for value, row, column in zip(values, part.rows, part.columns, strict=True):
            if dim == 1:
                each = value.expand(
                    rows if len(values) == 1 else len(value), *value.shape[1:]
                )
                found.append(each[row, column][None])
            else:
                found.append(value[(slice(None),) * dim + (column,)])
        return torch.cat(found, dim) if len(found) > 1 else found[0]

    def dim_of_tokens(self, value: Tensor, number: int) -> int | None:
        """The dimension of a field in which a batch has its tokens."""
        (rows, width), shape = self.documents[number].numbers.shape, tuple(value.shape)
        if rows == 1 and shape[1:3] == (1, width):  # positions in several dimensions
            return 2
        if shape[:2] in ((rows, width), (1, width)):  # positions may be of all rows
            return 1
        return 0 if rows == 1 and shape[:1] == (width,) else None


class _Part:
    """Some documents of loader batches.

    Args:
        documents: of each batch.
        chosen: the places of some, counted over all batches, ascending.
        missing: how many tokens one more document has, in which nothing counts; each of
            them is the first token again. None if nothing is filled up.

    Attributes:
        chosen: their places in each batch.
        lengths: of the documents.
        rows: of each batch, for each token the row where it is.
        columns: and the column.
    """

    def __init__(
        self,
        documents: Sequence[Documents],
        chosen: Sequence[int],
        missing: int | None = None,
    ) -> None:
        self.missing = missing
        self.chosen: list[list[int]] = []
        self.rows: list[Tensor] = []
        self.columns: list[Tensor] = []
        lengths = list[int]()
        ends = accumulate((len(each.spans) for each in documents), initial=0)
        for each, (first, stop) in zip(documents, pairwise(ends), strict=True):
            self.chosen.append([n - first for n in chosen if first <= n < stop])
            spans = [each.spans[place] for place in self.chosen[-1]]
            own = [span.stop - span.start for span in spans]
            row = torch.tensor([span.row for span in spans], dtype=torch.long)
            row = row.repeat_interleave(torch.tensor(own, dtype=torch.long))
            columns = [torch.arange(span.start, span.stop) for span in spans]
            column = torch.cat(columns) if columns else row
            if missing:
                row = torch.cat([row, row[:1].expand(missing)])
                column = torch.cat([column, column[:1].expand(missing)])
            self.rows.append(row)
            self.columns.append(column)
            lengths += own
        self.lengths = torch.tensor([*lengths, missing] if missing else lengths)

    def numbered(self, value: Tensor, found: Tensor) -> Tensor:
        """Numbers from a field's first one on, without a gap."""
        first = value.flatten()[0].clamp_min(0)
        anew = torch.arange(len(self.lengths)).repeat_interleave(self.lengths)
        return (anew.to(first.device) + first).to(value.dtype).view_as(found)


# ---- several loader batches ---------------------------------------------------------


def alike(fields: Sequence[Sequence[Field]], batches: Sequence[Any]) -> Any:
    """Each field with its values in all batches; refuses other fields."""
    paths = [[field.path for field in each] for each in fields]
    for each in paths:
        if each != paths[0]:
            names = sorted({*each} ^ {*paths[0]})
            raise unlike(names, batches, "must have the same fields")
    columns = zip(*fields, strict=True)
    return [(column[0].path, [f.value for f in column]) for column in columns]


def the_same(path: str, values: Sequence[Any], batches: Sequence[Any]) -> Any:
    """What every row of a pool's loader batches has in common, which must not
    differ."""
    if not all(are_equal(values[0], each) for each in values[1:]):
        raise unlike(path, batches, "is shared by its rows, and differs")
    return values[0]


def unlike(name: Any, batches: Sequence[Any], why: str) -> TrainkitError:
    """An error for loader batches that cannot be put together."""
    return TrainkitError(
        f"MicroBatching pool: loader batches are joined, and of these {name!r} {why}: "
        f"{describe(batches[0])}, ..., {describe(batches[-1])}. Let the collate "
        f"function make them alike, or leave pool out."
    )
