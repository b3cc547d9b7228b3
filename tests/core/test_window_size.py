"""A window's size that knows where windows began."""

from __future__ import annotations

import copy
import pickle

import pytest

from trainkit.core.window_size import WindowSize


@pytest.mark.parametrize("first", [0, 1, 4, 9])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_remainder_equals_the_place_in_the_window(size: int, first: int) -> None:
    """yolov5#3722: with a plain number the place depends on where the epoch began."""
    window = WindowSize(size, first)
    places = [batch_idx % window for batch_idx in range(first, first + 3 * size)]
    assert places == 3 * list(range(size))
    plain = [batch_idx % size for batch_idx in range(first, first + 3 * size)]
    assert (plain == places) == (first % size == 0)


def test_in_all_else_it_is_a_number() -> None:
    size = WindowSize(3, 4)
    assert isinstance(size, int)
    assert (size, size + 1, 2 * size, 12 / size, -size) == (3, 4, 6, 4.0, -3)
    assert (size % 2, 7 // size, min(size, 5), max(size, 2)) == (1, 2, 3, 3)
    assert (str(size), repr(size), f"{size:02}") == ("3", "3", "03")
    assert hash(size) == hash(3)
    assert WindowSize(3, 1) == WindowSize(3, 2) == 3
    assert list(range(size)) == [0, 1, 2]
    assert type(int(size)) is int


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copy_equals_original(copied: object) -> None:
    again = copied(WindowSize(3, 4))  # type: ignore[operator]
    assert (type(again), again, again.first_batch) == (WindowSize, 3, 4)
    assert 6 % again == 2
