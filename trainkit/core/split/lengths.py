"""How long the rows of a batch are: what of each row is no padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.core.batches import Path, describe, lookup
from trainkit.core.split.fields import Field
from trainkit.core.split.partition import Span
from trainkit.core.split.rows import Group
from trainkit.core.strategies import AccumulationStrategy, PerToken
from trainkit.errors import TrainkitError


class UnclearLengths(TrainkitError):
    """Integer lengths that fit several padded lengths.

    Args:
        text: the message.
        padded_lengths: those that they fit.
    """

    def __init__(self, text: str, padded_lengths: Sequence[int]) -> None:
        super().__init__(text)
        self.padded_lengths = padded_lengths


def spans_of(counts: Tensor, *, from_first: bool = False) -> list[Span]:
    """For each row the columns from the first that counts to the last.

    >>> spans_of(torch.tensor([[0, 1, 0, 1, 0], [0, 0, 0, 0, 0]]))
    [(1, 4), (0, 1)]

    Args:
        counts: what is not 0 counts; rows first, columns second.
        from_first: each row begins at column 0 whatever counts.

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
        path: what tells the lengths.
        strategy: its labels are known by their `ignore_index`.
        columns: the padded lengths that tensors of the batch may have; needed for
            integer lengths, which do not tell it.
        num_rows: the rows of the batch.
    """
    found = as_tensor(batch, path)
    if len(found) != num_rows:
        raise TrainkitError(
            f"MicroBatching lengths {str(path)!r}: must have an entry for each of the "
            f"{num_rows} rows of the batch, but has {len(found)}, in the batch "
            f"{describe(batch)}."
        )
    if found.ndim == 2 and found.shape[1] == 1 and not _is_mask(found):
        found = found.flatten()
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
    """The mask that a batch of sequences commonly has, if it has the common form."""
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
    """The strategy's labels or token weights, and where they count; None without."""
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
    """The lengths that labels tell, or full rows where they cannot be known.

    What is ignored behind a row's last label is mostly padding, but not always: in
    masked language models it is text. It is taken for padding only if

    - the batch's longest row has its last label in the last column, as after padding
      to the longest;
    - no row has ignored labels between others;
    - there are other tensors of this length, and behind the last labels each holds
      one and the same value in all rows.

    Otherwise the rows count as full, and nothing is trimmed. What is ignored before a
    row's first label may be a prompt, and is always kept.
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
    return group if all(_is_one_value(each, padding) for each in others) else full


def padding_of(group: Group) -> Tensor:
    """Where a group's rows are padding: True there, rows by columns."""
    columns = torch.arange(group.padded_length)
    starts, stops = torch.tensor(list(group.spans), dtype=torch.long).T.unsqueeze(2)
    after = columns >= stops
    return after | (columns < starts) if group.begins_late else after


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


def _is_one_value(values: Tensor, where: Tensor) -> bool:
    """Whether a tensor holds one and the same at some positions of all rows."""
    number = int(where.flatten().to(torch.uint8).argmax())
    row, column = divmod(number, where.shape[1])
    one = values[row, column]
    same = (values == one) | ((values != values) & (one != one))  # NaN is like NaN
    return bool((same | ~where.view(*where.shape, *[1] * (values.ndim - 2))).all())


def _is_mask(found: Tensor) -> bool:
    return found.dtype is torch.bool or not bool((found > 1).any())


def _same(batch: Any, path: Path, value: Any) -> bool:
    try:
        return lookup(batch, path) is value
    except TrainkitError:
        return False
