"""Axes hold all their values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.cli.report.line import LARGEST
from trainkit.pages.look import DARK, LIGHT, is_wide, limits, number

numbers = st.floats(-LARGEST, LARGEST)


@given(numbers, numbers, st.booleans(), st.booleans())
def test_every_value_is_on_the_axis(
    one: float, other: float, from_zero: bool, may_be_log: bool
) -> None:
    least, most = sorted([one, other])
    is_log = may_be_log and is_wide(least, most)
    low, high = limits(least, most, is_log=is_log, from_zero=from_zero)
    assert low <= least <= most <= high
    assert low < high < float("inf")
    assert low > 0 or not is_log
    assert low <= 0 <= high or is_log or not from_zero


@pytest.mark.parametrize(
    ("least", "most", "around"),
    [
        (0.0, 0.0, (0.0, 1.0)),  # a share of -100 % there is not
        (0.0, 100.0, (0.0, 106.0)),
        (-100.0, 0.0, (-106.0, 0.0)),
        (2.0, 2.0, (0.0, 2.12)),
    ],
)
def test_zero_is_an_end_of_the_axis(
    least: float, most: float, around: tuple[float, float]
) -> None:
    assert limits(least, most, from_zero=True) == pytest.approx(around)


def test_noise_below_six_digits_is_no_mountain() -> None:
    low, high = limits(1.0, 1.0 + 1e-9)
    assert high - low == pytest.approx(1e-4)
    low, high = limits(1.0, 1.1)  # the control
    assert high - low == pytest.approx(0.112)


@given(st.floats(-1e6, 1e6))
def test_a_number_is_the_value_to_six_digits(value: float) -> None:
    assert float(number(value).replace(",", "")) == float(f"{value:.6g}")


def test_both_themes_have_every_colour() -> None:
    assert LIGHT.keys() == DARK.keys()
