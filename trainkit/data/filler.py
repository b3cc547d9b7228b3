"""Rows that weigh nothing, where a batch or a rank would have too few."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainkit.data.padding import as_tensor, can_hold
from trainkit.errors import TrainkitError


class Filler(int):
    """The index of a row that is loaded to fill a place, and must weigh nothing."""


class Filled(Dataset[Any]):
    """A dataset whose fillers have been made to weigh nothing.

    Args:
        dataset: with rows by index.
        weigh_nothing: makes of a row one that weighs nothing.
    """

    def __init__(self, dataset: Any, weigh_nothing: Callable[[Any], Any]) -> None:
        self.dataset = dataset
        self.weigh_nothing = weigh_nothing

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self._read(index, self.dataset[int(index)])

    def __getitems__(self, indices: list[int]) -> list[Any]:
        # By which torch reads a batch at once, of datasets that can.
        at_once = getattr(self.dataset, "__getitems__", None)
        if at_once is None:
            return [self[index] for index in indices]
        rows = at_once([int(index) for index in indices])
        return [self._read(*each) for each in zip(indices, rows, strict=True)]

    def _read(self, index: int, row: Any) -> Any:
        return self.weigh_nothing(row) if isinstance(index, Filler) else row


class WeighNothing:
    """Sets fields of a row to a value with which it weighs nothing.

        WeighNothing(labels=-100)    # for PerToken: no token has a loss
        WeighNothing(weight=0.0)     # for PerSample(mask="weight") and a weighted mean

    A batch may have no other rows. Then a loss that divides by its own count is 0/0,
    which makes gradients NaN, and is refused: divide by `count.clamp(min=1)`. torch's
    `cross_entropy` with `ignore_index` needs nothing. BatchNorm takes fillers for rows
    like any other: where there is some, leave such rows out by `last="drop"`.

    Args:
        **values: for each field, what all of it becomes.
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
        changed = {name: _all(name, row, value) for name, value in self.values.items()}
        return {**row, **changed}


def _all(name: str, row: Mapping[str, Any], value: float) -> Any:
    if name not in row:
        raise TrainkitError(
            f"WeighNothing {name}: must be a field of each row, received a row of "
            f"{', '.join(map(str, row))}."
        )
    return _replaced(name, row[name], value)


def _replaced(name: str, old: Any, value: float) -> Any:
    if isinstance(old, list | tuple):
        # A named tuple is made of its fields, by a method of its own.
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
            f"WeighNothing {name}: {value!r} is no value of {tensor.dtype}, of which "
            f"the field is: it would become another one, which may weigh something. "
            f"Choose another, or give the field another type."
        )
    if isinstance(old, Tensor):
        return torch.full_like(old, value)
    if isinstance(old, Number):
        return type(old)(value)  # type: ignore[call-arg]
    array = old.copy()
    array.fill(value)
    return array
