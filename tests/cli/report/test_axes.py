"""The axis of a chart, by its values."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from trainkit.cli.report.chart import Chart
from trainkit.cli.report.drawing import draw
from trainkit.cli.report.line import Line

LAST = 199


def chart(value: Callable[[int], float], *, last: int = LAST) -> Chart:
    steps = range(last + 1)
    series = Line("loss", tuple(map(float, steps)), tuple(map(value, steps)))
    return Chart("loss", "", "", (series,), may_be_log=True)


def steep(step: int) -> float:
    """High for 20 steps, then between 2 and 2.3."""
    return 9.0 - 0.3 * step if step < 20 else 2.0 + 0.1 * (step % 4)


@pytest.mark.parametrize(
    ("value", "axis"),
    [
        (steep, "late"),
        (lambda step: steep(step) - 2, "late"),  # 0 has no logarithm
        (lambda step: 100 * math.exp(-step / 30), "log"),
        # controls: slowly; as high at the end as at the start; only at the end; level
        (lambda step: 5 - 3 * step / LAST, "whole"),
        (lambda step: 2.0 + step % 3, "whole"),
        (lambda step: steep(LAST - step), "whole"),
        (lambda step: 2.0, "whole"),
    ],
)
def test_high_first_values_do_not_decide_the_axis(
    value: Callable[[int], float], axis: str
) -> None:
    assert chart(value).axis == axis


def test_a_few_values_are_all_shown() -> None:
    def value(step: int) -> float:
        return 9.0 if step < 3 else 2.0 + 0.1 * (step % 2)

    assert chart(value, last=20).axis == "late"
    assert chart(value, last=19).axis == "whole"


def test_a_chart_that_is_clipped_says_so() -> None:
    low, high = draw(chart(steep), 1000).axes[0].get_ylim()
    assert low < 2
    assert 2.3 < high < 2.4
    said = "before step 50 values go up to 9"
    assert draw(chart(steep), 1000).axes[0].get_title(loc="right") == said
    whole = draw(chart(lambda step: 4 - step / LAST), 1000).axes[0]  # the control
    assert whole.get_ylim()[1] > 4
    assert whole.get_title(loc="right") == ""
