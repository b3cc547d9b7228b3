"""Batches of some documents of a batch, one behind the other in one row."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
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
from trainkit.core.nested import Field, describe, take_apart
from trainkit.errors import TrainkitError


class Flattening:
    """Makes batches of some documents of a batch.

    Offsets, numbers and greatest lengths are made anew. What has an entry for each
    token, or for each document, is cut. All else is shared.

    Args:
        batch: in which the documents were found.
        documents: all of them.
        shared: values of fields that are shared all the same.

    Attributes:
        fields: the parts of the batch, in order.
    """

    def __init__(
        self, batch: Any, documents: Documents, shared: Sequence[Any] = ()
    ) -> None:
        self._documents, self._shared = documents, [id(value) for value in shared]
        self.fields, self._build = take_apart(
            batch, lambda path, value: isinstance(value, list)
        )

    def of(
        self,
        chosen: Sequence[int],
        *,
        missing: int | None = None,
        nothing: Mapping[int, float] | None = None,
    ) -> Any:
        """The batch of some documents, by their places, ascending.

        Args:
            chosen: the places.
            missing: how many tokens one more document has, in which nothing counts. The
                batch then has no field whose size depends on how many documents it has.
            nothing: the values, by the identity of a field, that do not count.
        """
        part = _Part(self._documents, chosen, missing, nothing or {})
        made = self._build(
            field.value if id(field.value) in self._shared else part.of(field)
            for field in self.fields
        )
        return made if missing is None else self._without_offsets(made)

    def _without_offsets(self, made: Any) -> Any:
        by = self._documents.by
        if isinstance(made, MutableMapping):
            for name in (*OFFSETS, *LONGEST):
                made.pop(name, None)
        name = by.rpartition(".")[2]
        if name not in KNOWN or name in OFFSETS and find_documents(made) is None:
            raise TrainkitError(
                f"MicroBatching shapes: documents must be told apart by a field with a "
                f"known name that has an entry for each token, such as position_ids or "
                f"seq_idx, beside which offsets are left out, and {by!r} does so. "
                f"PackCollate() has both."
            )
        return made

    def is_shared(self, field: Field) -> bool:
        """Whether every batch gets all of a field."""
        part = _Part(self._documents, [0])
        return id(field.value) in self._shared or part.of(field) is field.value


def first_fit(
    lengths: Sequence[int], tokens: int, size: int | None = None
) -> list[list[int]]:
    """Documents in as few bins as first fit finds, the longest placed first.

    One that is longer than a bin has a bin of its own.

    >>> first_fit([5, 3, 4, 2], 7)
    [[0, 3], [1, 2]]

    Args:
        lengths: of the documents.
        tokens: the most in a bin.
        size: the most documents in a bin.
    """
    bins, rooms = list[list[int]](), list[int]()
    for place in _longest_first(lengths):
        for number, room in enumerate(rooms):
            if room >= lengths[place] and len(bins[number]) != size:
                break
        else:
            number = len(bins)
            bins.append([])
            rooms.append(tokens)
        bins[number].append(place)
        rooms[number] -= lengths[place]
    return [sorted(each) for each in bins]


def dealt_out(lengths: Sequence[int], number: int) -> list[list[int]]:
    """Documents in a number of bins of like size, each put where it is emptiest.

    >>> dealt_out([5, 3, 4, 2], 2)
    [[0, 3], [1, 2]]
    """
    bins: list[list[int]] = [[] for _ in range(number)]
    size = -(-len(lengths) // number)
    for place in _longest_first(lengths):
        open_ones = [each for each in bins if len(each) < size]
        emptiest = min(open_ones, key=lambda b: sum(lengths[each] for each in b))
        emptiest.append(place)
    return [sorted(each) for each in bins if each]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda place: -lengths[place])


class _Part:
    """What some documents have of each field of their batch."""

    def __init__(
        self,
        documents: Documents,
        chosen: Sequence[int],
        missing: int | None = None,
        nothing: Mapping[int, float] | None = None,
    ) -> None:
        self._documents, self._chosen = documents, list(chosen)
        self._missing, self._nothing = missing, nothing or {}
        spans = [documents.spans[place] for place in chosen]
        self._lengths = torch.tensor([span.stop - span.start for span in spans])
        self._rows = torch.tensor([span.row for span in spans])
        self._rows = self._rows.repeat_interleave(self._lengths)
        columns = [torch.arange(span.start, span.stop) for span in spans]
        if missing:  # each of its tokens is the first one again
            last = torch.tensor([missing])
            self._lengths = torch.cat([self._lengths, last])
            self._rows = torch.cat([self._rows, self._rows[:1].expand(missing)])
            columns.append(columns[0][:1].expand(missing))
        self._columns = torch.cat(columns)

    def of(self, field: Field) -> Any:
        """The field's value for these documents."""
        name, value = field.path.rpartition(".")[2], field.value
        is_tensor = isinstance(value, Tensor) and value.layout is torch.strided
        if name in LONGEST:
            longest = int(self._lengths.max())
            return torch.full_like(value, longest) if is_tensor else longest
        if not is_tensor:
            has_each = isinstance(value, list) and len(value) == self._number
            return [value[place] for place in self._chosen] if has_each else value
        is_named = field.path == self._documents.by
        if name in OFFSETS or self._are_offsets(value, is_named):
            offsets = torch.cat([torch.zeros(1), self._lengths.cumsum(0)])
            return offsets.to(value.dtype).view(*[1] * (value.ndim - 1), -1)
        found = self._of_tokens(value, is_mask=is_named or "mask" in name)
        if found is None:
            has_each = value.ndim and len(value) == self._number
            return value[self._chosen] if has_each else value
        if self._missing:
            found = self._without_labels(field, found, self._missing)
        has_fill = bool(self._missing) and is_named
        is_mask = name in MASKS and found.ndim == 2
        is_mask = is_mask and (has_fill or bool(found.max() > 1))
        return self._numbered(value, found) if name in NUMBERS or is_mask else found

    def _are_offsets(self, value: Tensor, is_named: bool) -> bool:
        """Whether these are offsets, of a name that nobody knows."""
        number, width = (
            self._documents.numbers.numel(),
            self._documents.numbers.shape[1],
        )
        return are_offsets(value, width) and (is_named or int(value.max()) == number)

    def _without_labels(self, field: Field, found: Tensor, missing: int) -> Tensor:
        """The entries for tokens, of which those of the filler count nothing."""
        value = self._nothing.get(id(field.value))
        if value is None and "label" in field.path.lower():
            value = None if found.is_floating_point() else IGNORED
        if value is None:
            return found
        found, dim = found.clone(), min(found.ndim - 1, 1)
        if found.shape[dim] != len(self._columns):
            dim = 0
        found.narrow(dim, found.shape[dim] - missing, missing).fill_(value)
        return found

    @property
    def _number(self) -> int:
        return len(self._documents.spans)

    def _numbered(self, value: Tensor, found: Tensor) -> Tensor:
        """Numbers from the batch's first one on, without a gap."""
        first = value.flatten()[0].clamp_min(0)
        anew = torch.arange(len(self._lengths)).repeat_interleave(self._lengths)
        return (anew + first).to(value.dtype).view_as(found)

    def _of_tokens(self, value: Tensor, *, is_mask: bool) -> Tensor | None:
        """The entries for these documents' tokens; None if it has none for tokens."""
        rows, width = self._documents.numbers.shape
        shape = tuple(value.shape)
        is_square = value.ndim > 2 and shape[-2:] == (width, width)
        if is_square and self._missing is not None:
            raise TrainkitError(
                f"MicroBatching shapes: a mask of blocks, {describe(value)}, cannot be "
                f"filled up. Let the model make it of position_ids or seq_idx."
            )
        if is_square and shape[0] in (1, rows) and (value.ndim > 3 or is_mask):
            return self._blocks(value)
        if is_square and rows == 1 and shape[0] != 1:  # of each head
            return value[..., self._columns[:, None], self._columns]
        if rows == 1 and shape[1:3] == (1, width):  # positions in several dimensions
            return value[:, :, self._columns]
        if shape[:2] == (rows, width):
            return value[self._rows, self._columns].unsqueeze(0)
        if shape[:2] == (1, width):  # positions that all rows share
            return value[:, self._columns]
        is_flat = rows == 1 and shape[:1] == (width,)
        return value[self._columns] if is_flat else None

    def _blocks(self, value: Tensor) -> Tensor:
        """A mask of blocks; documents of different rows do not see each other."""
        size = len(self._rows)
        made = value.min().expand(1, *value.shape[1:-2], size, size).clone()
        for row in self._rows.unique().tolist():
            at = (self._rows == row).nonzero().flatten()
            columns = self._columns[at]
            own = value[row % len(value)][..., columns[:, None], columns]
            made[0, ..., at[:, None], at] = own
        return made
