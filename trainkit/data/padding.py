"""Collating samples whose tensors differ in length into a padded batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from trainkit.core.plan.options import check_kind
from trainkit.errors import TrainkitError

Columns = dict[Any, list[Any]]
"""Each field of all samples."""


class PadCollate:
    """A `collate_fn` that pads ragged fields at their ends, and can add a mask.

        PadCollate({"labels": -100})     # all other fields are padded with 0

    A sample is a mapping, tuple or list of fields, or a single tensor. Tensors, arrays
    and lists of numbers are stacked, and padded to the largest size in each dimension.
    Numbers become a tensor, anything else becomes a list. The length of a sample is
    that of its first field that has a dimension.

    >>> batch = PadCollate({"y": -1}, mask="m")([{"y": [1, 2]}, {"y": [3]}])
    >>> batch["y"].tolist(), batch["m"].tolist()
    ([[1, 2], [3, -1]], [[1, 1], [1, 0]])

    Args:
        fill: the padding value of each field, by name, or by index in a tuple.
            Default: 0.
        mask: name of a 0/1 mask to add to the batch: 1 up to a sample's length.
    """

    def __init__(
        self,
        fill: Mapping[Any, float] | None = None,
        *,
        mask: str | None = None,
    ) -> None:
        fill = {} if fill is None else fill
        check_kind("PadCollate fill", fill, Mapping, "a dict, as {'labels': -100}")
        self.fill, self.mask = dict(fill), mask

    def __call__(self, samples: Sequence[Any]) -> Any:
        columns = columns_of("PadCollate", samples)
        self._check_names(columns, is_named=isinstance(samples[0], Mapping))
        batch = self._batch(columns)
        if isinstance(samples[0], Mapping):
            return batch
        if _is_one_field(samples[0]):
            return batch[0]
        kind = type(samples[0])
        return getattr(kind, "_make", kind)(batch.values())  # or a named tuple

    def _batch(self, columns: Columns) -> dict[Any, Any]:
        lengths: list[int] | None = None
        batch: dict[Any, Any] = dict(columns)
        for name, column in columns.items():
            found = _as_tensors(name, column)
            if found is not None:
                if lengths is None and all(each.ndim for each in found):
                    lengths = [len(each) for each in found]
                batch[name] = self._stacked(name, found)
        if self.mask is not None:
            if lengths is None:
                raise TrainkitError(
                    "PadCollate mask: needs a field that has a length, received "
                    "samples without. Add a field that is a list or tensor, or leave "
                    "mask out."
                )
            ones = [torch.ones(length, dtype=torch.long) for length in lengths]
            batch[self.mask] = self._stacked(self.mask, ones)
        return batch

    def _stacked(self, name: Any, found: list[Tensor]) -> Tensor:
        if len({each.ndim for each in found}) > 1:
            shapes = sorted({str(tuple(each.shape)) for each in found})
            raise TrainkitError(
                f"PadCollate: field {name!r} must have as many dimensions in every "
                f"sample, received the shapes {', '.join(shapes)}."
            )
        shape = [max(sizes) for sizes in zip(*(t.shape for t in found), strict=True)]
        batch = torch.full(
            (len(found), *shape), self.fill.get(name, 0), dtype=self._dtype(name, found)
        )
        for row, each in zip(batch, found, strict=True):
            row[tuple(map(slice, each.shape))] = each
        return batch

    def _dtype(self, name: Any, found: list[Tensor]) -> torch.dtype:
        # torch takes an empty list for floats, whatever the others are.
        filled = [each for each in found if each.numel()] or found
        dtype = reduce(torch.promote_types, (each.dtype for each in filled))
        value = self.fill.get(name, 0)
        if not can_hold(dtype, value):
            raise TrainkitError(
                f"PadCollate fill {name!r}: must be a value of the field's type, "
                f"{dtype}, received {value!r}. Choose another value, or give the field "
                f"another type."
            )
        return dtype

    def _check_names(self, columns: Columns, *, is_named: bool) -> None:
        for name in self.fill:
            if name not in columns:
                raise TrainkitError(
                    f"PadCollate fill: must name fields of the samples, received "
                    f"{name!r}. Their fields are {', '.join(map(repr, columns))}."
                )
        if self.mask is not None and (not is_named or self.mask in columns):
            what = "of another type" if not is_named else "that have such a field"
            raise TrainkitError(
                f"PadCollate mask: samples must be mappings without a field of this "
                f"name, received {self.mask!r} for samples {what}. Make each sample a "
                f"dict, or choose another name."
            )


def can_hold(dtype: torch.dtype, value: float) -> bool:
    """Whether a type can represent a value.

    >>> [can_hold(torch.uint8, value) for value in (0, -100, 0.5)]
    [True, False, False]
    """
    if dtype.is_floating_point or dtype.is_complex:
        return True
    if dtype == torch.bool:
        return value in (0, 1)
    limits = torch.iinfo(dtype)
    return limits.min <= value <= limits.max and value == int(value)


def columns_of(collate: str, samples: Sequence[Any]) -> Columns:
    """Each field of all samples, which must have the same ones."""
    if not samples:
        raise TrainkitError(f"{collate}: needs at least one sample, received none.")
    first = samples[0]
    if _is_one_field(first):
        return {0: list(samples)}
    names: Any = list(first) if isinstance(first, Mapping) else range(len(first))
    for sample in samples:
        own = list(sample if isinstance(first, Mapping) else range(len(sample)))
        if {*own} != {*names}:
            raise TrainkitError(
                f"{collate}: every sample must have the fields of the first and no "
                f"others, {', '.join(map(repr, names))}, received one with "
                f"{', '.join(map(repr, own)) or 'none'}."
            )
    return {name: [sample[name] for sample in samples] for name in names}


def _is_one_field(sample: Any) -> bool:
    return not isinstance(sample, Mapping | tuple | list) or _are_numbers(sample)


def _as_tensors(name: Any, column: list[Any]) -> list[Tensor] | None:
    """A field's values as tensors; None if they are not numbers, tensors or arrays."""
    found = [as_tensor(value) for value in column]
    kept = [each for each in found if each is not None]
    if kept and len(kept) < len(found):
        other = next(v for v, t in zip(column, found, strict=True) if t is None)
        raise TrainkitError(
            f"PadCollate: field {name!r} must be numbers in every sample or in none, "
            f"received {type(other).__name__} beside tensors or numbers."
        )
    return kept or None


def as_tensor(value: Any) -> Tensor | None:
    """A tensor of a number, array or list of numbers; None for any other value."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Number) or _are_numbers(value) or _is_array(value):
        return torch.tensor(value)  # a copy: arrays may be read-only
    return None


def _is_array(value: Any) -> bool:
    """Whether a value is an array of numbers, not of texts, dates or objects."""
    return hasattr(value, "__array__") and value.__array__().dtype.kind in "biufc"


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, Number) for each in value)
