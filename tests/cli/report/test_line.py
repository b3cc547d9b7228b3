"""Columns become lines; of too many values the extremes are kept."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.cli.report.line import Line, read_lines

NAN = math.nan
values = st.lists(
    st.one_of(st.floats(-1e6, 1e6), st.just(NAN)), min_size=1, max_size=400
)


def line(numbers: list[float]) -> Line:
    return Line("loss", tuple(map(float, range(len(numbers)))), tuple(numbers))


@given(values, st.integers(1, 40))
def test_what_is_drawn_keeps_the_extremes_the_ends_and_the_gaps(
    numbers: list[float], most: int
) -> None:
    whole = line(numbers)
    drawn = whole.thinned(4 * most)
    if len(numbers) <= 4 * most:
        assert drawn is whole
        return
    assert len(drawn.steps) <= 2 * most + 2
    assert list(drawn.steps) == sorted(set(drawn.steps))
    assert (drawn.steps[0], drawn.steps[-1]) == (whole.steps[0], whole.steps[-1])
    for place in (0, -1):
        assert drawn.values[place] is numbers[place]
    finite = [value for value in numbers if math.isfinite(value)]
    low, high = ([y for y in edge if y == y] for edge in (drawn.low, drawn.high))
    assert bool(finite) == bool(low)
    if finite:
        assert (min(low), max(high)) == (min(finite), max(finite))
    assert any(map(math.isnan, drawn.values)) == any(map(math.isnan, numbers))
    for least, mean, largest in zip(drawn.low, drawn.values, drawn.high, strict=True):
        room = 1e-9 * max(abs(least), abs(largest))
        assert math.isnan(mean) or least - room <= mean <= largest + room


def test_each_n_th_value_would_lose_a_peak() -> None:
    """The control: what thinning must not be."""
    numbers = [1.0] * 1000
    numbers[501] = 9.0
    assert max(line(numbers).thinned(200).high) == 9.0
    assert max(numbers[::20]) == 1.0


def test_the_mean_of_a_stretch_leaves_out_its_gaps() -> None:
    drawn = line([1.0, 3.0, 5.0, NAN, 8.0, NAN, NAN, 6.0, 2.0]).thinned(8)
    assert drawn.steps == (0.0, 2.0, 3.0, 5.0, 7.0, 8.0)  # a gap ends its stretch
    assert drawn.values[:2] == (1.0, 4.0)
    assert math.isnan(drawn.values[2])
    assert drawn.values[3] == 7.0
    assert math.isnan(drawn.values[4])
    assert drawn.values[5] == 2.0


def test_what_is_not_finite_is_a_gap() -> None:
    cells = ["1.5", "nan", "inf", "-inf", "2"]
    rows = [{"step": str(n), "loss": cell} for n, cell in enumerate(cells)]
    found = read_lines(rows)["loss"]
    assert found.shown == [(0, 1.5), (4, 2.0)]
    assert [math.isnan(value) for value in found.values] == [False, *[True] * 3, False]


def test_a_window_that_logged_no_loss_is_a_gap_and_a_row_of_others_is_none() -> None:
    rows = [
        {"step": "0", "window/loss": "3", "window/weight": "8"},
        {"step": "1", "window/weight": "8"},  # the loss was NaN
        {"step": "1", "val/loss": "2"},
        {"step": "2", "window/loss": "1", "window/weight": "8"},
    ]
    found = read_lines(rows)
    loss, weight = found["window/loss"], found["window/weight"]
    assert loss.steps == weight.steps == (0, 1, 2)
    assert loss.shown == [(0, 3.0), (2, 1.0)]
    assert weight.values == (8.0, 8.0, 8.0)


@pytest.mark.parametrize(
    ("row", "known"),
    [
        ({"step": "0", "note": "good", "flag": "True"}, set()),
        ({"loss": "2"}, set()),  # of no step
        ({"step": "x", "loss": "2"}, set()),
        ({"step": "0", "epoch": "1", "loss": "2"}, {"loss"}),
        ({"step": "0", "loss": "nan"}, set()),  # nothing that could be drawn
        ({"step": "0", "loss": "2", None: ["7", "8"]}, {"loss"}),  # too many cells
    ],
)
def test_only_numbers_of_a_step_are_drawn(row: dict, known: set[str]) -> None:
    assert set(read_lines([row])) == known


def test_steps_rise_whatever_the_order_of_rows() -> None:
    rows = [{"step": step, "loss": step} for step in ("3", "1", "2")]
    assert read_lines(rows)["loss"].steps == (1.0, 2.0, 3.0)
