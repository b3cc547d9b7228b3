"""Which dimensions of which tensors are padding, and may be left out.

A tensor is ragged if its dimension 1 has the padded length of a group of rows. A tensor
can have this length by chance, or hold a second sequence of unknown lengths. So every
batch is checked anew: the columns that would go must be padding in this very batch.
Otherwise nothing of it is trimmed, which is always exact.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainkit.core.batches import Path, describe, lookup
from trainkit.core.split.fields import Field
from trainkit.core.split.padding import is_padding, padding_of
from trainkit.core.split.rows import Group
from trainkit.core.strategies import AccumulationStrategy, PerToken
from trainkit.errors import TrainkitError

Trims = list[tuple[int, int]]
"""Dimensions to trim, each with the number of the group whose columns it has."""

Targets = tuple[Tensor, Tensor]
"""The strategy's labels or token weights, and where they count."""


class _Ragged(NamedTuple):
    """A group of ragged tensors, known by their padded length.

    Attributes:
        number: its place among the groups.
        group: its rows.
        padding: where they are padding; None if no row has padding.
    """

    number: int
    group: Group
    padding: Tensor | None


class Trimming:
    """Decides for each field of a batch what to trim.

    A dimension that once differed from every padded length is not ragged, even if it
    happens to have such a length later.

    Args:
        ragged: further dimensions to trim, by path; an empty tuple means not even
            dimension 1.
        strategy: its targets must not count where they are trimmed.
    """

    def __init__(
        self, ragged: Mapping[Path, Sequence[int]], strategy: AccumulationStrategy
    ) -> None:
        self._ragged = ragged
        self._strategy = strategy
        self._not_ragged: dict[tuple[str, int, Any], set[int]] = {}
        self._has_said = False

    def columns(self, batch: Any, fields: Sequence[Field], num_rows: int) -> list[int]:
        """The padded lengths that the batch's ragged tensors may have."""
        named = self._named(batch)
        return [
            field.value.shape[dim % len(field.value.shape)]
            for field in fields
            if is_table(field.value, num_rows)
            for dim in named.get(id(field.value), (1,))
            if dim not in self._not_ragged.get(_key(field), ())
        ]

    def of(
        self,
        batch: Any,
        fields: Mapping[int, Field],
        groups: Sequence[Group],
        targets: Targets | None,
        masks: Collection[int],
    ) -> dict[int, Trims] | None:
        """What to trim of which field, by the field's number.

        Args:
            batch: the loader batch.
            fields: those that are cut, by their number.
            groups: the lengths.
            targets: the strategy's, if it has any.
            masks: ids of the tensors that hold the lengths.

        Returns:
            None if a column that would go is not padding: then nothing of this batch
            may be trimmed. A warning says so once.
        """
        found = {
            group.padded_length: _Ragged(
                number, group, padding_of(group) if group.has_padding else None
            )
            for number, group in enumerate(groups)
        }
        named = self._named(batch)
        num_rows = len(groups[0].spans)
        trims = {}
        for number, field in fields.items():
            if not is_table(field.value, num_rows):
                continue
            extra = named.get(id(field.value))
            dims = self._dims_of(field, found)
            if extra is not None:
                dims = _named_dims(batch, field, extra, found, is_first=1 in dims)
            if not dims:
                continue
            is_known = extra is not None or id(field.value) in masks
            why = self._why_not(field, dims, found, targets, is_known)
            if why is not None:
                if why:
                    self.say(
                        f"field {field.path!r} {why}", _ways_out(field, dims), batch
                    )
                return None
            shape = field.value.shape
            trims[number] = [(dim, found[shape[dim]].number) for dim in dims]
        return trims

    def say(self, what: str, ways_out: str, batch: Any) -> None:
        """Warn once that nothing of a batch is trimmed, and why."""
        if not self._has_said:
            self._has_said = True
            warnings.warn(
                f"MicroBatching: {what}, so nothing of this batch is trimmed, nor of "
                f"any other where that is so. The step does not change, and computes "
                f"the padding too. The batch is {describe(batch)}. {ways_out}If "
                f"several tensors have lengths of their own, as in an encoder and a "
                f"decoder, name all that tells them: lengths=('attention_mask', "
                f"'path.of.the.other'). With trim=False nothing ever is.",
                stacklevel=2,
            )

    def _named(self, batch: Any) -> dict[int, tuple[int, ...]]:
        return {id(lookup(batch, p)): tuple(dims) for p, dims in self._ragged.items()}

    def _dims_of(self, field: Field, found: Mapping[int, _Ragged]) -> list[int]:
        """The dimensions that have a padded length, and padding."""
        shape = field.value.shape
        not_ragged = self._not_ragged.setdefault(_key(field), set())
        not_ragged.update(d for d in range(1, len(shape)) if shape[d] not in found)
        return [
            dim
            for dim in range(1, len(shape))
            if dim not in not_ragged and found[shape[dim]].padding is not None
        ]

    def _why_not(
        self,
        field: Field,
        dims: Sequence[int],
        found: Mapping[int, _Ragged],
        targets: Targets | None,
        is_known: bool,
    ) -> str | None:
        """The reason not to trim a field; "" if there is too little evidence."""
        shape = field.value.shape
        if not is_known and dims != [1]:
            return (
                f"has a further dimension as long as the padded rows, {list(shape)}, "
                f"dimension {' and '.join(map(str, dims))} of it"
            )
        ragged = found.get(shape[1])
        if ragged is None or ragged.padding is None:
            return None
        group, padding = ragged.group, ragged.padding
        if targets is not None and targets[0] is field.value:
            return self._why_no_targets(group, targets[1], padding)
        answer = "yes" if is_known else is_padding(field.value, group, padding)
        if answer == "no":
            return "holds values where the lengths say that its rows are padding"
        return None if answer == "yes" else ""

    def _why_no_targets(
        self, group: Group, counts: Tensor, padding: Tensor
    ) -> str | None:
        strategy = self._strategy
        assert isinstance(strategy, PerToken)
        targets = counts if counts.ndim == 2 else counts.flatten(2).any(2)
        if bool((targets & padding.to(targets.device)).any()):
            return (
                f"holds targets that count where the lengths say that its rows are "
                f"padding (not so if they were {strategy.ignore_index} there, or 0 in "
                f"a mask)"
            )
        if not strategy.shift or not group.begins_late:
            return None
        starts = torch.tensor([start for start, _ in group.spans])
        firsts = targets.cpu().gather(1, starts.unsqueeze(1)).squeeze(1)
        if bool((firsts & (starts > 0)).any()):
            return (
                f"is padded on the left, and with shift=True the first target of a row "
                f"is predicted from padding (not so if it were "
                f"{strategy.ignore_index})"
            )
        return None


def _key(field: Field) -> tuple[str, int, Any]:
    """A field, its number of dimensions, its dtype."""
    return field.path, len(field.value.shape), field.value.dtype


def is_table(value: Any, num_rows: int) -> bool:
    """Whether it is a tensor or array of numbers with rows and columns."""
    shape = getattr(value, "shape", ())
    is_numeric = getattr(getattr(value, "dtype", "O"), "kind", "f") in "biufc"
    return is_numeric and len(shape) > 1 and shape[0] == num_rows


def _ways_out(field: Field, dims: Sequence[int]) -> str:
    which = dims[0] if len(dims) == 1 else tuple(dims)
    only = (
        f"{{{field.path!r}: 1}} if only the first is, " if dims[0] == 1 != which else ""
    )
    return (
        f"If its columns may be left out all the same, say MicroBatching(ragged="
        f"{{{field.path!r}: {which}}}), {only}{{{field.path!r}: ()}} if it is no "
        f"sequence. "
    )


def _named_dims(
    batch: Any,
    field: Field,
    extra: Sequence[int],
    found: Mapping[int, _Ragged],
    *,
    is_first: bool,
) -> list[int]:
    """The dimensions that the user names, and dimension 1 if it is ragged."""
    padded = {length for length, each in found.items() if each.padding is not None}
    shape = field.value.shape
    dims = {dim % len(shape) for dim in extra}
    if dims and is_first:
        dims.add(1)
    for dim in dims:
        if shape[dim] not in found and padded:
            raise TrainkitError(
                f"MicroBatching: dimension {dim} of field {field.path!r} is ragged, so "
                f"it must be as long as the lengths say, {sorted(found)}, but is "
                f"{shape[dim]}, in the batch {describe(batch)}. If dimension 1 is no "
                f"sequence, say MicroBatching(ragged={{{field.path!r}: ()}}); to give "
                f"every micro-batch all columns, trim=False."
            )
    return sorted(dim for dim in dims if shape[dim] in padded)
