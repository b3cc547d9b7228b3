"""Axes hold all their values, and round numbers stand along them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.cli.report.series import LARGEST
from trainkit.cli.report.ticks import Scale, labels

numbers = st.floats(-LARGEST, LARGEST)


@given(st.lists(numbers, min_size=1, max_size=9), st.booleans(), st.booleans())
def test_every_value_and_tick_is_on_the_axis(
    values: list[float], from_zero: bool, may_be_log: bool
) -> None:
    scale = Scale.over(values, from_zero=from_zero, may_be_log=may_be_log)
    ticks = scale.ticks()
    for value in [*values, *ticks]:
        assert -1e-9 <= scale.place(value) <= 1 + 1e-9
    assert len(ticks) <= 16
    assert all(a < b for a, b in itertools.pairwise(ticks))
    assert len(labels(ticks)) == len(ticks)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=9))
def test_order_is_kept(values: list[float]) -> None:
    scale = Scale.over(values)
    places = [scale.place(value) for value in sorted(values)]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.0, 1.0], [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        ([0.0, 0.001], [0.0, 0.0002, 0.0004, 0.0006, 0.0008, 0.001]),
        ([0.0, 7.0], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]),
        ([0.0], [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        ([-3.0, 3.0], [-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0]),
    ],
)
def test_ticks_are_round(values: list[float], ticks: list[float]) -> None:
    from_zero = values == [0.0]  # nothing is below it then
    assert Scale.over(values, pad=0, from_zero=from_zero).ticks() == ticks


def test_far_apart_is_logarithmic_where_that_is_allowed() -> None:
    far = [0.01, 50.0]
    assert Scale.over(far, may_be_log=True).is_log
    assert not Scale.over(far).is_log
    assert not Scale.over([0.0, 50.0], may_be_log=True).is_log
    assert not Scale.over([1.0, 2.0], may_be_log=True).is_log
    ticks = Scale.over([0.5, 20.0], may_be_log=True).ticks()
    assert labels(ticks) == ["0.5", "1", "2", "5", "10", "20"]
