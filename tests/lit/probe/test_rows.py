"""Rows are those of the loader, put together by its own function."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
)

from tests.helpers import pad, ragged_sequences
from trainkit.lit.probe.rows import LEAST, Rows, num_elements


def test_batches_are_made_by_the_loaders_own_function() -> None:
    loader = DataLoader(ragged_sequences(20), 5, collate_fn=pad)  # type: ignore[arg-type]
    longest = sorted(ragged_sequences(20), key=num_elements, reverse=True)[:5]
    for name, tensor in Rows(loader).longest(5).items():
        assert torch.equal(tensor, pad(longest)[name])


def test_the_longest_come_first_and_round_again() -> None:
    rows = Rows(DataLoader([[1], [1, 2, 3], [1, 2]], 2, collate_fn=list))  # type: ignore[arg-type]
    assert rows.longest(4) == [[1, 2, 3], [1, 2], [1], [1, 2, 3]]


def test_no_more_rows_are_read_than_are_needed() -> None:
    read: list[int] = []

    class Data:
        def __len__(self) -> int:
            return 10**6

        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return [index]

    rows = Rows(DataLoader(Data(), 4, collate_fn=list))  # type: ignore[arg-type]
    assert len(rows) == 10**6
    rows.longest(8)
    assert len(read) == LEAST
    rows.longest(2 * LEAST)
    assert read == list(range(4 * LEAST))


def test_a_data_set_that_is_asked_for_several_rows_at_once() -> None:
    class Data:
        def __len__(self) -> int:
            return 3

        def __getitems__(self, indices: list[int]) -> Any:
            return [index * 10 for index in indices]

    assert Rows(DataLoader(Data(), 3, collate_fn=list)).longest(3) == [0, 10, 20]  # type: ignore[arg-type]


def test_a_stream_has_no_known_end_and_goes_round() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from range(3)

    rows = Rows(DataLoader(Stream(), 2, collate_fn=list))
    assert len(rows) > 10**9
    assert rows.longest(4) == [0, 1, 2, 0]


def test_a_plain_batch_sampler_is_read_through() -> None:
    sampler = BatchSampler(SequentialSampler(range(7)), 2, drop_last=False)
    rows = Rows(DataLoader(range(7), batch_sampler=sampler, collate_fn=list))  # type: ignore[arg-type]
    assert len(rows) == 7
    assert rows.longest(3) == [0, 1, 2]


@pytest.mark.parametrize(
    ("row", "number"),
    [
        (torch.zeros(2, 3), 6),
        (np.zeros((4, 2)), 8),
        ({"text": "four", "ids": [1, 2]}, 6),
        ((torch.zeros(()), 1.5, None), 3),
        (np.float32(1), 1),
    ],
)
def test_what_a_row_holds(row: Any, number: int) -> None:
    assert num_elements(row) == number
