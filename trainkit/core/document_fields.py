"""How the fields of a batch tell where documents begin, and what they are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainkit.core.nested import Field

OFFSETS = (
    "cu_seq_lens_q", "cu_seq_lens_k", "cu_seq_lens", "cu_seqlens", "cu_seqlens_q",
    "cu_seqlens_k", "cu_doc_lens",
)  # fmt: skip
LONGEST = ("max_length_q", "max_length_k", "max_seqlen", "max_seqlen_q", "max_seqlen_k")
NUMBERS = ("seq_idx", "document_ids", "doc_ids", "sequence_ids", "sequence_id")
POSITIONS = ("position_ids",)
MASKS = ("attention_mask",)
KNOWN = {*OFFSETS, *NUMBERS, *POSITIONS, *MASKS}

IGNORED = -100
"""The label that does not count, as in `cross_entropy`."""

Read = Callable[[Tensor, Sequence[Field]], Tensor | None]
"""Says at which tokens documents begin; None if a field does not tell."""


def reader_by_values(value: Tensor, fields: Sequence[Field]) -> Read | None:
    """How a field is read whose name says nothing; None if its values tell nothing."""
    if value.ndim > 2:
        return by_mask
    shape = shape_beside(value, fields)
    if are_offsets(value, None if shape is None else shape[1]):
        return by_offsets
    table = _table(value)
    steps = torch.zeros(1) if table is None else table.diff(dim=1)
    if (steps == 0).sum() > (steps == 1).sum():
        return _by_numbers
    return _by_positions if bool((steps <= 1).all()) else None


def by_offsets(value: Tensor, fields: Sequence[Field]) -> Tensor | None:
    """Offsets into each row of tokens: 0, 5, 9."""
    table, shape = _table(value), shape_beside(value, fields)
    if table is None or shape is None or len(table) != shape[0]:
        return None
    rows, width = shape
    begins = table.new_zeros((rows, width + 1), dtype=torch.bool)
    return begins.scatter(1, table.clamp(0, width), True)[:, :width]


def _by_numbers(value: Tensor, fields: Sequence[Field]) -> Tensor | None:
    """A number for each token: 0, 0, 1, 1."""
    table = _table(value)
    if table is None or _shape_of_tokens(value, fields) != table.shape:
        return None
    return begins_of(table)


def _by_positions(value: Tensor, fields: Sequence[Field]) -> Tensor | None:
    """Positions that begin anew: 0, 1, 2, 0, 1."""
    table = _table(value)
    shape = None if table is None else _shape_of_tokens(value, fields)
    if table is None or shape is None:
        return None
    table = table.expand(shape)
    begins = torch.ones_like(table, dtype=torch.bool)
    begins[:, 1:] = table[:, 1:] <= table[:, :-1]
    return begins


def by_mask(value: Tensor, fields: Sequence[Field]) -> Tensor | None:
    """A mask of 1, 1, 2, 2, or of blocks; one of 1 and 0 says where a row begins."""
    rows, width = len(value), value.shape[-1]
    if value.ndim > 2 and value.shape[-2] == width:
        if all(tuple(each.value.shape) != (rows, width) for each in fields):
            return None  # whatever it is, it masks no tokens
        is_seen = value if value.dtype is torch.bool else value == value.amax()
        is_seen = is_seen.flatten(1, -3).any(1) if value.ndim > 3 else is_seen
        columns = torch.arange(width, device=value.device)
        sees = is_seen | (columns[:, None] == columns)  # padding sees itself
        first = sees.long().argmax(-1)
        return first == columns  # a document's first token sees none before it
    table = _table(value)
    if table is None:
        return None
    begins = torch.ones_like(table, dtype=torch.bool)
    begins[:, 1:] = table[:, 1:] > table.cummax(1).values[:, :-1]
    is_behind = table.flip(1).cummax(1).values.flip(1) == 0  # nothing follows
    begins[:, 1:] |= is_behind[:, 1:] & ~is_behind[:, :-1]
    return begins


READERS = (
    (OFFSETS, by_offsets),
    (NUMBERS, _by_numbers),
    (POSITIONS, _by_positions),
    (MASKS, by_mask),
)
"""What fields of these names tell, those first that say it most plainly."""


def begins_of(numbers: Tensor) -> Tensor:
    """Where a row begins, or a number differs from the one before it."""
    begins = torch.ones_like(numbers, dtype=torch.bool)
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    return begins


# ---- shapes --------------------------------------------------------------------------


def _is_whole(value: Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex()) and value.ndim > 0


def are_offsets(value: Tensor, width: int | None) -> bool:
    """Whether these are numbers from 0 on that never fall, and not one for each token
    of a row."""
    if not _is_whole(value) or value.squeeze().ndim != 1 or value.numel() < 2:
        return False
    if value.numel() == width:
        return False
    flat = value.flatten()
    return bool((flat[0] == 0) & (flat.diff() >= 0).all() & (flat[-1] >= len(flat) - 1))


def table_shape(value: Tensor) -> tuple[int, ...]:
    """The rows and columns of a field of tokens; without rows, one row."""
    shape = tuple(value.shape)
    return (1, *shape) if len(shape) == 1 else shape


def _table(value: Tensor) -> Tensor | None:
    """Whole numbers by rows and columns; None if they are something else."""
    if not _is_whole(value) or value.ndim > 2 or not value.numel():
        return None
    return value.long().view(table_shape(value))


def _shape_of_tokens(value: Tensor, fields: Sequence[Field]) -> tuple[int, ...] | None:
    """The rows and columns of the fields beside one of tokens, which rows may share;
    None if none fits."""
    rows, width = table_shape(value)
    others = [n for n, size in _shapes_beside(value, fields) if size == width]
    most = max(others, default=0)
    return None if rows > most else (most if rows == 1 else rows, width)


def shape_beside(offsets: Tensor, fields: Sequence[Field]) -> tuple[int, ...] | None:
    """The rows and columns of the tokens into which offsets lead."""
    shapes = _shapes_beside(offsets, fields)
    of_documents = (1, offsets.shape[-1] - 1)  # such as a target of each
    shapes = [shape for shape in shapes if shape != of_documents] or shapes
    return max(shapes, key=shapes.count, default=None)


def _shapes_beside(value: Tensor, fields: Sequence[Field]) -> list[tuple[int, ...]]:
    """The rows and columns of the fields beside one, but of masks and biases."""
    shapes = list[tuple[int, ...]]()
    for path, other in fields:
        is_told = path.rpartition(".")[2] in (*OFFSETS, *LONGEST)
        is_square = other.ndim > 2 and other.shape[-1] == other.shape[-2]
        if other is value or is_told or not other.ndim or is_square:
            continue
        if other.ndim == 2 and len(other) > 1 and other.is_floating_point():
            shapes.append((1, len(other)))  # features of tokens, in one row
        shapes.append(table_shape(other)[:2])
    return shapes
