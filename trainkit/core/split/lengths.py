"""The lengths of a batch's rows: which columns of each row are not padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.core.batches import Path, describe, lookup
from trainkit.core.split.fields import Field
from trainkit.core.split.padding import is_all, padding_of
from trainkit.core.split.partition import Span
from trainkit.core.split.rows import Group
from trainkit.core.strategies import AccumulationStrategy, PerToken
from trainkit.errors import TrainkitError


class UnclearLengths(TrainkitError):
    """An error for integer lengths that fit several padded lengths."""

    def __init__(self, text: str, padded_lengths: Sequence[int]) -> None:
        super().__init__(text)
        self.padded_lengths = padded_lengths


def spans_of(counts: Tensor, *, from_first: bool = False) -> list[Span]:
    """The columns of each row, from the first that counts to the last.

    >>> spans_of(torch.tensor([[0, 1, 0, 1, 0], [0, 0, 0, 0, 0]]))
    [(1, 4), (0, 1)]

    Args:
        counts: rows first, columns second; an entry counts unless it is 0.
        from_first: whether each row begins at column 0 whatever counts.

    Returns:
        (first, behind the last) of each row; (0, 1) for a row where nothing counts,
        since a micro-batch needs at least one column.
    """
    marks = counts != 0 if counts.dtype is not torch.bool else counts
    if not marks.shape[1]:
        return [(0, 0)] * len(marks)
    if marks.ndim > 2:
        marks = marks.flatten(2).any(2)
    marks = marks.to(torch.uint8)  # argmax knows no bool
    padded_length = marks.shape[1]
    firsts = marks.argmax(1).tolist()
    behind = marks.flip(1).argmax(1).tolist()
    counted = marks.any(1).tolist()
    return [
        (0 if from_first else first, padded_length - after) if any_ else (0, 1)
        for first, after, any_ in zip(firsts, behind, counted, strict=True)
    ]


def group_of_path(
    batch: Any,
    path: Path,
    strategy: AccumulationStrategy,
    columns: Sequence[int],
    num_rows: int,
) -> Group:
    """The lengths that a user named: a mask, integers, or the strategy's labels.

    Args:
        batch: the loader batch.
        path: where the lengths are.
        strategy: its labels are known by their `ignore_index`.
        columns: the padded lengths that tensors of the batch may have; integer lengths
            do not show which of them is meant.
        num_rows: the rows of the batch.
    """
    found = as_tensor(batch, path)
    if len(found) != num_rows:
        raise TrainkitError(
            f"MicroBatching lengths {str(path)!r}: must have an entry for each of the "
            f"{num_rows} rows of the batch, but has {len(found)}, in the batch "
            f"{describe(batch)}."
        )
    if found.ndim == 2 and found.shape[1] == 1 and bool((found > 1).any()):
        found = found.flatten()  # no mask
    if found.ndim == 1:
        return _group_of_numbers(batch, path, found, columns)
    if isinstance(strategy, PerToken) and strategy.mask is None:
        if _same(batch, strategy.labels, lookup(batch, path)):
            counts = found.long() != strategy.ignore_index
            return Group.make(found.shape[1], spans_of(counts, from_first=True))
    if found.is_floating_point() and bool((found < 0).any()):
        raise TrainkitError(
            f"MicroBatching lengths {str(path)!r}: a mask has 0 for padding and "
            f"numbers above 0 elsewhere, received numbers below 0, as in a mask that "
            f"is added. Name a mask of 0 and 1, or the rows' lengths."
        )
    return Group.make(found.shape[1], spans_of(found))


def as_tensor(batch: Any, path: Path) -> Tensor:
    """The tensor at a path of lengths, with one entry for each row."""
    found = lookup(batch, path)
    if not isinstance(found, Tensor):
        try:
            found = torch.as_tensor(found)
        except (TypeError, ValueError, RuntimeError):
            found = torch.tensor(0)
    if found.ndim == 0 or found.is_complex() or found.is_nested:
        raise TrainkitError(
            f"MicroBatching lengths {str(path)!r}: must lead to a mask or to integers, "
            f"one for each row, but leads to {describe(lookup(batch, path))} in the "
            f"batch {describe(batch)}."
        )
    return found


def attention_mask(batch: Any) -> Tensor | None:
    """The batch's `"attention_mask"`, if it is rows by columns of at least 0."""
    if not isinstance(batch, Mapping):
        return None
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return None
    is_added = mask.is_floating_point() and bool((mask < 0).any())
    return None if is_added else mask


def targets_of(
    batch: Any, strategy: AccumulationStrategy
) -> tuple[Tensor, Tensor] | None:
    """The strategy's labels or token weights, and where they count; None if it has no
    such tensor."""
    if not isinstance(strategy, PerToken):
        return None
    path = strategy.labels if strategy.mask is None else strategy.mask
    try:
        found = lookup(batch, path)
    except TrainkitError:
        return None  # weight() says so
    if not isinstance(found, Tensor) or found.ndim < 2 or found.is_nested:
        return None  # a label for each row
    if strategy.mask is not None:
        return found, found != 0
    return found, found.long() != strategy.ignore_index


def group_of_targets(targets: Tensor, counts: Tensor, fields: Sequence[Field]) -> Group:
    """The lengths that labels show, or full rows if they show none.

    Ignored columns behind a row's last label are mostly padding, but in masked language
    models they are text. They are taken for padding only if

    - the batch's longest row has its last label in the last column, as after padding
      to the longest;
    - no row has ignored labels between others;
    - there are other tensors of this length, and behind the last labels each holds
      one single value in all rows.

    Otherwise the rows count as full, and nothing is trimmed. Ignored columns before a
    row's first label may be a prompt, and are always kept.
    """
    num_rows, padded_length = targets.shape
    full = Group.make(padded_length, [(0, padded_length)] * num_rows)
    if bool(counts.all()):
        return full
    others = [
        field.value
        for field in fields
        if _has_columns(field.value, num_rows, padded_length)
        and field.value is not targets
    ]
    if not others or not bool(counts[:, -1].any()):
        return full
    begins = (counts[:, 1:] & ~counts[:, :-1]).sum(1) + counts[:, 0]
    if bool((begins > 1).any()):
        return full
    spans = spans_of(counts, from_first=True)
    labelled = counts.any(1).tolist()  # a row without labels could be of any length
    group = Group.make(
        padded_length,
        [
            span if has_labels else (0, padded_length)
            for span, has_labels in zip(spans, labelled, strict=True)
        ],
    )
    padding = padding_of(group).to(targets.device)
    row, column = divmod(
        int(padding.flatten().to(torch.uint8).argmax()), padded_length
    )  # the first padding
    is_padding = all(is_all(each, each[row, column], padding) for each in others)
    return group if is_padding else full


def _group_of_numbers(
    batch: Any, path: Path, found: Tensor, columns: Sequence[int]
) -> Group:
    lengths = found.tolist()
    whole = all(float(length).is_integer() and length >= 0 for length in lengths)
    if found.dtype is torch.bool or not whole:
        raise TrainkitError(
            f"MicroBatching lengths {str(path)!r}: lengths must be whole numbers of at "
            f"least 0, received {describe(found)} {lengths[:8]}. Name a mask of rows "
            f"by columns, or the rows' lengths."
        )
    longest = max(lengths, default=1)
    candidates = {length for length in columns if length >= longest}
    if longest in candidates:
        candidates = {longest}
    if len(candidates) != 1:
        raise UnclearLengths(
            f"MicroBatching lengths {str(path)!r}: the longest row has {longest} "
            f"columns, and the batch must have tensors of one padded length of at "
            f"least that, but those found are {sorted(set(columns))}. The batch is "
            f"{describe(batch)}. Name a mask of the padded length instead, or say "
            f"which other dimension is ragged, such as ragged={{'waves': 2}} for rows "
            f"by channels by time.",
            sorted(candidates),
        )
    spans = [(0, max(1, int(length))) for length in lengths]
    return Group.make(candidates.pop(), spans)


def _has_columns(value: Any, num_rows: int, padded_length: int) -> bool:
    return isinstance(value, Tensor) and value.shape[:2] == (num_rows, padded_length)


def _same(batch: Any, path: Path, value: Any) -> bool:
    try:
        return lookup(batch, path) is value
    except TrainkitError:
        return False
