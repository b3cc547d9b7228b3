"""Rows that weigh nothing, for batches or ranks that would have too few rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainkit.data.padding import as_tensor, can_hold
from trainkit.errors import TrainkitError


class Filler(int):
    """The index of a row that only fills a place, and must weigh nothing."""


class Filled(Dataset[Any]):
    """A dataset that applies `weigh_nothing` to each row with the index of a filler."""

    def __init__(self, dataset: Any, weigh_nothing: Callable[[Any], Any]) -> None:
        self.dataset = dataset
        self.weigh_nothing = weigh_nothing

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self._read(index, self.dataset[int(index)])

    def __getitems__(self, indices: list[int]) -> list[Any]:
        # torch calls this to read a whole batch, which the dataset may do at once.
        at_once = getattr(self.dataset, "__getitems__", None)
        if at_once is None:
            return [self[index] for index in indices]
        rows = at_once([int(index) for index in indices])
        return [self._read(*each) for each in zip(indices, rows, strict=True)]

    def _read(self, index: int, row: Any) -> Any:
        return self.weigh_nothing(row) if isinstance(index, Filler) else row


class WeighNothing:
    """Sets fields of a row to a value with which the row weighs nothing.

        WeighNothing(labels=-100)    # for PerToken: no token has a loss
        WeighNothing(weight=0.0)     # for PerSample(mask="weight") and a weighted mean

    A batch may have no other rows. A loss that divides by its own count is then 0/0,
    which makes gradients NaN and is refused: divide by `count.clamp(min=1)`. torch's
    `cross_entropy` with `ignore_index` needs no change. BatchNorm counts fillers as
    rows: if the model has BatchNorm, leave `weigh_nothing=` out.

    Args:
        **values: for each field, the value that fills it.
    """

    def __init__(self, **values: float) -> None:
        if not values:
            raise TrainkitError(
                "WeighNothing: needs at least one field and its value, received none. "
                "For instance WeighNothing(labels=-100)."
            )
        self.values = values

    def __call__(self, row: Any) -> Any:
        if not isinstance(row, Mapping):
            raise TrainkitError(
                f"WeighNothing: rows must be mappings, received {type(row).__name__}. "
                f"Give weigh_nothing= a function of your own."
            )
        for name in self.values:
            if name not in row:
                raise TrainkitError(
                    f"WeighNothing {name}: must be a field of each row, received a row "
                    f"of {', '.join(map(str, row))}."
                )
        fields = self.values.items()
        return {**row, **{name: _replaced(name, row[name], v) for name, v in fields}}


def _replaced(name: str, old: Any, value: float) -> Any:
    if isinstance(old, list | tuple):
        # A named tuple is made from its fields by `_make`.
        make = getattr(type(old), "_make", type(old))
        return make([_replaced(name, each, value) for each in old])
    tensor = as_tensor(old)
    if tensor is None:
        raise TrainkitError(
            f"WeighNothing {name}: must be a tensor, an array, a number or a list of "
            f"them, received {type(old).__name__}. Give weigh_nothing= a function of "
            f"your own."
        )
    if not can_hold(tensor.dtype, value):
        raise TrainkitError(
            f"WeighNothing {name}: must be a value of the field's type, "
            f"{tensor.dtype}, received {value!r}: rounded to it, the row could weigh "
            f"something. Choose another value, or give the field another type."
        )
    if isinstance(old, Tensor):
        return torch.full_like(old, value)
    if isinstance(old, Number | np.generic):
        return type(old)(value)  # type: ignore[call-arg]
    array = old.copy()
    array.fill(value)
    return array
