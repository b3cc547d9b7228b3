"""Rows of the training loader, the longest first, as batches of any size."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset

LEAST = 64
"""How many rows are read at least, so that long ones are among them."""


class Rows:
    """The rows that a loader would yield, read in this process and kept on the host.

    The loader's own collate function makes batches of them. No worker is started. A
    batch that is larger than the data repeats rows.

    Args:
        loader: a `DataLoader` with a batch size, as the Trainer uses it.
    """

    def __init__(self, loader: Any) -> None:
        self._collate, self._rows = loader.collate_fn, list[Any]()
        self._counted: Any
        if isinstance(loader.dataset, IterableDataset):
            self._counted, self._source = loader.dataset, iter(loader.dataset)
        else:
            sampler = loader.sampler
            if not loader.batch_size:
                sampler = loader.batch_sampler.sampler
            self._counted, self._source = sampler, rows_at(loader.dataset, sampler)

    def __len__(self) -> int:
        """How many rows there are; `sys.maxsize` for a stream without a length."""
        try:
            return len(self._counted)
        except TypeError:
            return sys.maxsize

    def longest(self, size: int) -> Any:
        """A batch of the longest rows among at least twice as many."""
        wanted = max(2 * size, LEAST) - len(self._rows)
        self._rows += itertools.islice(self._source, max(wanted, 0))
        ordered = sorted(self._rows, key=num_elements, reverse=True)
        return self._collate([ordered[place % len(ordered)] for place in range(size)])


def num_elements(row: Any) -> int:
    """How many numbers and characters a row holds: its cost, before padding.

    >>> import torch
    >>> num_elements({"ids": torch.zeros(3, 4), "tags": [1, 2], "text": "abc"})
    17
    """
    if isinstance(row, Tensor):
        return row.numel()
    if isinstance(row, str | bytes):
        return len(row)
    if isinstance(row, Mapping):
        return sum(map(num_elements, row.values()))
    if isinstance(row, Sequence):
        return sum(map(num_elements, row))
    size = getattr(row, "size", 1)  # an array of NumPy
    return size if isinstance(size, int) else 1


def rows_at(dataset: Any, indices: Iterable[Any]) -> Iterator[Any]:
    """Rows of a data set, read one by one."""
    fetch = getattr(dataset, "__getitems__", None)
    for index in indices:
        yield dataset[index] if fetch is None else fetch([index])[0]
