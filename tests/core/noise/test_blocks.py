"""Sums of windows in blocks that follow each other."""

from __future__ import annotations

import copy

import pytest
import torch

from trainkit.core.noise.blocks import BLOCKS, Blocks
from trainkit.core.noise.estimate import COLUMNS


def filled(number: int, last: int = 160) -> Blocks:
    """The n-th window has n in all columns, but a gradient of 1 and one window."""
    blocks = Blocks(last)
    for window in range(number):
        row = torch.full((len(COLUMNS),), float(window), dtype=torch.float64)
        row[0] = row[1] = row[2] = row[-1] = 1
        blocks.add(row)
    return blocks


@pytest.mark.parametrize("number", [1, 7, 20, 21, 39, 40, 41, 79, 155, 160])
def test_up_to_the_limit_no_window_is_lost(number: int) -> None:
    table = filled(number).table
    assert table is not None
    assert table[:, -1].sum() == number
    assert table[:, 4].sum() == sum(range(number))
    assert min(number, BLOCKS // 2) <= len(table) <= BLOCKS


@pytest.mark.parametrize(("last", "each"), [(160, 8), (100, 4), (20, 1), (3, 1)])
def test_beyond_it_the_oldest_go(last: int, each: int) -> None:
    number = 1000
    table = filled(number, last).table
    assert table is not None
    kept = int(table[:, -1].sum())
    assert BLOCKS * each - each < kept <= BLOCKS * each
    assert table[:, 4].sum() == sum(range(number - kept, number))


def test_a_long_gradient_moves_the_unit_by_a_quarter_of_the_way() -> None:
    blocks = Blocks(160)
    row = torch.ones(len(COLUMNS), dtype=torch.float64)
    for squared in (1.0, 101.0, 1.0):
        row[0] = squared
        blocks.add(row)
    assert blocks.table is not None
    assert blocks.table[:, 0].tolist() == pytest.approx([1, 101, 1 / 26])


@pytest.mark.parametrize("number", [0, 3, 20, 33, 170])
def test_a_resumed_one_goes_on_to_the_bit(number: int) -> None:
    straight = filled(number)
    resumed = Blocks(160)
    state = copy.deepcopy(straight.state_dict())
    resumed.load_state_dict(state, torch.device("cpu"))
    for blocks in (straight, resumed):
        for n in range(50):
            blocks.add(torch.full((len(COLUMNS),), 0.1 * n, dtype=torch.float64))
    assert straight.table is not None
    assert resumed.table is not None
    assert torch.equal(straight.table, resumed.table)
    assert straight.num_windows == resumed.num_windows == number + 50
