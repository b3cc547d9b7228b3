"""Which dimensions of which tensors are padding, and may be left out.

A tensor is ragged if its dimension 1 is as long as a group of lengths says. Chance can
make it so too, so what a column holds is looked at once for each field, in the first
batch that has padding; what a field has been found to be, it stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.core.batches import Path, describe, lookup
from trainkit.core.split.fields import Field
from trainkit.core.split.lengths import padding_of, targets_of
from trainkit.core.split.rows import Group
from trainkit.core.strategies import AccumulationStrategy, PerToken
from trainkit.errors import TrainkitError

Key = tuple[str, int, Any]
"""A field, its number of dimensions, its dtype."""

Trims = list[tuple[int, int]]
"""Dimensions to trim, each with the number of the group that says how far."""

WAYS_OUT = (
    "If dimension 1 is no sequence, say MicroBatching(ragged={{{path!r}: ()}}); to "
    "give every micro-batch all columns, trim=False."
)


class Trimming:
    """Says for each field of a batch what to trim, and remembers it.

    Args:
        ragged: further dimensions to trim, by path; none at all for an empty tuple.
        strategy: its targets must not count where they are trimmed.
    """

    def __init__(
        self, ragged: Mapping[Path, Sequence[int]], strategy: AccumulationStrategy
    ) -> None:
        self._ragged = ragged
        self._strategy = strategy
        self._known: dict[Key, tuple[int, ...]] = {}

    def columns(self, batch: Any, fields: Sequence[Field], num_rows: int) -> list[int]:
        """The padded lengths that the batch's ragged tensors may have."""
        named = self._named(batch)
        return [
            field.value.shape[dim % len(field.value.shape)]
            for field in fields
            if is_table(field.value, num_rows)
            and self._known.get(key_of(field), (1,)) != ()
            for dim in named.get(id(field.value), (1,))
        ]

    def of(
        self, batch: Any, fields: Mapping[int, Field], groups: Sequence[Group]
    ) -> dict[int, Trims]:
        """What to trim of which field, by the field's number.

        Raises:
            TrainkitError: a column that would go holds something.
        """
        if not any(group.has_padding for group in groups):
            return {}
        named = self._named(batch)
        num_rows = len(groups[0].spans)
        by_length = {group.padded_length: i for i, group in enumerate(groups)}
        trims = {}
        for number, field in fields.items():
            if is_table(field.value, num_rows):
                dims = self._known.get(key_of(field))
                if dims is None:
                    extra = named.get(id(field.value))
                    dims = self._decide(batch, field, groups, extra)
                if dims:
                    trims[number] = _by_group(batch, field, dims, by_length)
        return trims

    def _named(self, batch: Any) -> dict[int, tuple[int, ...]]:
        return {id(lookup(batch, p)): tuple(dims) for p, dims in self._ragged.items()}

    def _decide(
        self,
        batch: Any,
        field: Field,
        groups: Sequence[Group],
        extra: tuple[int, ...] | None,
    ) -> tuple[int, ...]:
        """A field is seen for the first time: its dimensions to trim."""
        shape = field.value.shape
        group = next((g for g in groups if g.padded_length == shape[1]), None)
        if extra is not None:
            dims = {dim % len(shape) for dim in extra}
            if dims and group is not None:
                dims.add(1)
        else:
            dims = {1} if group is not None else set()
            ragged_lengths = {g.padded_length for g in groups if g.padded_length > 1}
            if ragged_lengths.intersection(shape[2:]):
                raise TrainkitError(_further_dimension(batch, field, ragged_lengths))
            if group is not None and not group.has_padding:
                return ()  # nothing to see yet, nothing to trim
            if group is not None:
                self._check(batch, field, group)
        self._known[key_of(field)] = tuple(sorted(dims))
        return self._known[key_of(field)]

    def _check(self, batch: Any, field: Field, group: Group) -> None:
        """Refuse to trim what holds information."""
        values = field.value
        if not isinstance(values, Tensor):
            values = torch.as_tensor(values)
        padding = padding_of(group).to(values.device)
        targets = targets_of(batch, self._strategy)
        if targets is not None and targets[0] is field.value:
            self._check_targets(field, group, targets[1], padding)
        elif not _is_padding(values, group, padding):
            raise TrainkitError(
                f"MicroBatching: field {field.path!r} holds values where the lengths "
                f"say that its rows are padding, so trimming would lose them, in the "
                f"batch {describe(batch)}. Name what tells its lengths in lengths=. "
                + WAYS_OUT.format(path=field.path)
            )

    def _check_targets(
        self, field: Field, group: Group, counts: Tensor, padding: Tensor
    ) -> None:
        strategy = self._strategy
        assert isinstance(strategy, PerToken)
        targets = counts if counts.ndim == 2 else counts.flatten(2).any(2)
        if bool((targets & padding).any()):
            raise TrainkitError(
                f"MicroBatching: targets {field.path!r} count where the lengths say "
                f"that their rows are padding, so the loss would change with trimming. "
                f"Make them {strategy.ignore_index} there (or 0, in a mask), name "
                f"other lengths=, or say trim=False."
            )
        starts = torch.tensor([start for start, _ in group.spans])
        firsts = targets.cpu().gather(1, starts.unsqueeze(1)).squeeze(1)
        if strategy.shift and bool((firsts & (starts > 0)).any()):
            raise TrainkitError(
                f"MicroBatching: with padding on the left and shift=True the first "
                f"target of a row, in {field.path!r}, is predicted from padding, so "
                f"the loss depends on how far the row is padded. Make it "
                f"{strategy.ignore_index}, or say trim=False."
            )


def key_of(field: Field) -> Key:
    return field.path, len(field.value.shape), field.value.dtype


def is_table(value: Any, num_rows: int) -> bool:
    """Whether it is a tensor or array of numbers, rows by columns."""
    shape = getattr(value, "shape", ())
    is_numeric = getattr(getattr(value, "dtype", "O"), "kind", "f") in "biufc"
    return is_numeric and len(shape) > 1 and shape[0] == num_rows


def _by_group(
    batch: Any, field: Field, dims: Sequence[int], by_length: Mapping[int, int]
) -> Trims:
    shape = field.value.shape
    for dim in dims:
        if shape[dim] not in by_length:
            raise TrainkitError(
                f"MicroBatching: dimension {dim} of field {field.path!r} is ragged, so "
                f"it must be as long as the lengths say, {sorted(by_length)}, but is "
                f"{shape[dim]}, in the batch {describe(batch)}. "
                + WAYS_OUT.format(path=field.path)
            )
    return [(dim, by_length[shape[dim]]) for dim in dims]


def _further_dimension(batch: Any, field: Field, lengths: set[int]) -> str:
    path, shape = field.path, field.value.shape
    dims = [dim for dim in range(1, len(shape)) if shape[dim] in lengths]
    all_of_them = dims[0] if len(dims) == 1 else tuple(dims)
    only_first = f"{{{path!r}: 1}} that only the first is, " if dims[0] == 1 else ""
    return (
        f"MicroBatching: field {path!r} has a further dimension as long as the "
        f"padded rows, {list(shape)}, in the batch {describe(batch)}. Say whether it "
        f"is to be trimmed too: MicroBatching(ragged={{{path!r}: {all_of_them}}}) says "
        f"that it is, {only_first}{{{path!r}: ()}} that none is."
    )


def _is_padding(values: Tensor, group: Group, padding: Tensor) -> bool:
    """Whether columns hold nothing where they are padding.

    They may be constant on each side of each row, or the rows may all be alike, as
    positions are.
    """
    before = torch.tensor([[start] for start, _ in group.spans])
    left = torch.arange(group.padded_length) < before
    shape = (*padding.shape, *[1] * (values.ndim - 2))
    left = left.to(values.device).view(shape)
    edge = torch.where(left, values[:, :1], values[:, -1:])
    same = (values == edge) | ((values != values) & (edge != edge))  # NaN is like NaN
    if bool((same | ~padding.view(shape)).all()):
        return True
    return len(values) > 1 and bool((values == values[:1]).all())
