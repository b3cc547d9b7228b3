"""What stands in a chart, in the page and in its PNG."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread

from tests.cli.report.runs import page_of, run_folder
from trainkit.cli.report.chart import Chart
from trainkit.cli.report.drawing import _add_head
from trainkit.cli.report.drawing import draw as draw_with
from trainkit.cli.report.line import LARGEST, Line
from trainkit.pages.look import LIGHT

NAN = math.nan


def test_each_chart_has_a_png_and_an_old_one_goes(tmp_path: Path) -> None:
    rows = [{"step": n, "window/loss": 3.0 - n, "val/loss": 1.0} for n in range(3)]
    folder = run_folder(tmp_path, [*rows, {"step": 3, "window/weight": 8}])
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "padding.png").touch()  # of what is logged no more
    page_of(folder, pictures=True)
    names = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert names == {"loss.png", "weight.png"}
    pixels = (imread(tmp_path / "pictures" / "loss.png")[..., :3] * 255).round()
    colours = {tuple(map(int, each)) for each in pixels.reshape(-1, 3)}
    for style in ("train", "validation"):  # both lines are there
        red, green, blue = (int(LIGHT[style][at : at + 2], 16) for at in (1, 3, 5))
        assert (red, green, blue) in colours


def test_each_metric_has_one_of_its_own_and_those_of_others_stay(
    tmp_path: Path,
) -> None:
    """However it is called, also where A and a are one file."""
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "samples.png").touch()  # of a callback of the user's
    names = ["a/b", "a_b", "A_B", "x" * 300]
    folder = run_folder(tmp_path, [{"step": 0, **dict.fromkeys(names, 1.0)}])
    page_of(folder, pictures=True)
    found = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    long = f"metric_{'x' * 100}.png"
    drawn = ["metric_A_B_3.png", "metric_a_b.png", "metric_a_b_2.png"]
    assert found == [*drawn, long, "samples.png"]


def chart(*values: float, steps: Sequence[float] = (), **options: Any) -> Chart:
    series = Line("loss", tuple(steps or map(float, range(len(values)))), values)
    return Chart("loss", "Loss", "", (series,), **options)


def draw(chart: Chart) -> Any:
    return draw_with(chart, 1000)


def labels(axis: Axis) -> list[str]:
    """What stands along it, and a check that no text runs into the next."""
    low, high = sorted(axis.get_view_interval())
    places = zip(axis.get_majorticklocs(), axis.get_ticklabels(), strict=True)
    shown = [text for place, text in places if low <= place <= high]
    renderer = FigureCanvasAgg(axis.axes.figure).get_renderer()  # type: ignore[arg-type]
    boxes = [text.get_window_extent(renderer) for text in shown if text.get_text()]
    assert not any(a.overlaps(b) for a, b in zip(boxes, boxes[1:], strict=False))
    return [text.get_text() for text in shown]


def test_points_and_gaps_are_where_they_should_be() -> None:
    panel = draw(
        chart(3.0, 2.0, NAN, 4.0, NAN, 1.0, steps=[0, 10, 20, 30, 40, 90])
    ).axes[0]
    (line,) = panel.lines
    assert list(line.get_xdata()) == [0, 10, 20, 30, 40, 90]  # type: ignore[arg-type]
    assert str(list(line.get_ydata())) == str([3.0, 2.0, NAN, 4.0, NAN, 1.0])  # type: ignore[arg-type]
    assert line.get_marker() == "o"
    assert not panel.collections  # no band


def test_a_point_between_gaps_has_a_dot_in_a_long_line() -> None:
    values = [NAN, 2.0, NAN, *[1.0] * 100, NAN, 3.0]
    (line,) = draw(chart(*values)).axes[0].lines
    assert line.get_markevery() == [1, 104]
    (line,) = draw(chart(*[1.0] * 100)).axes[0].lines
    assert line.get_marker() == "None"  # the control


def test_thousands_of_points_are_a_mean_in_a_band_with_the_extremes() -> None:
    values = [1 + n % 7 / 10 for n in range(20_000)]
    values[777] = 9.5
    panel = draw(chart(*values)).axes[0]
    (line,), (band,) = panel.lines, panel.collections
    assert len(line.get_xdata()) < 700  # type: ignore[arg-type]
    assert max(line.get_ydata()) < 2  # type: ignore[arg-type]
    (path,) = band.get_paths()
    assert path.get_extents().y1 == 9.5
    assert panel.get_ylim()[1] > 9.5


def test_what_holds_until_the_next_is_drawn_as_stairs() -> None:
    (line,) = draw(chart(4.0, 8.0, as_stairs=True)).axes[0].lines
    assert line.get_drawstyle() == "steps-post"


@pytest.mark.parametrize(
    ("values", "options", "scale", "said"),
    [
        ([0.5, 20.0], {"may_be_log": True}, "log", ["0.5", "1", "2", "5", "10", "20"]),
        (
            [1e-4, 10],
            {"may_be_log": True},
            "log",
            ["0.0001", "0.001", "0.01", "0.1", "1", "10"],
        ),
        (
            [-1.0, 50.0],
            {"may_be_log": True},
            "linear",
            [str(n) for n in range(0, 51, 10)],
        ),
        ([0.0, 0.2], {"is_share": True}, "linear", ["0%", "5%", "10%", "15%", "20%"]),
        ([0.0, 7.0], {"from_zero": True}, "linear", ["0", "2", "4", "6"]),
        ([1.0, 1.0], {}, "linear", ["0.9", "0.95", "1", "1.05", "1.1"]),
        (
            [1.0, 1 + 1e-9],
            {},
            "linear",
            ["0.99996", "0.99998", "1", "1.00002", "1.00004"],
        ),
        ([2e6, 1e6], {}, "linear", [f"1,{n}00,000" for n in "02468"] + ["2,000,000"]),
    ],
)
def test_numbers_along_the_axis_are_round(
    values: list[float], options: dict[str, Any], scale: str, said: list[str]
) -> None:
    panel = draw(chart(*values, **options)).axes[0]
    assert panel.get_yscale() == scale
    assert labels(panel.yaxis) == said


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([0, 3], ["0", "1", "2", "3"]),  # there is no half a step
        ([7, 7], ["7"]),
        ([0, 0], ["0"]),
        ([0, 40], ["0", "10", "20", "30", "40"]),
        ([0, 2_345_678], "0 500,000 1,000,000 1,500,000 2,345,678".split()),
        ([0, 199], "0 50 100 150 199".split()),  # the last one, and none too near
    ],
)
def test_steps_are_whole_numbers_along_the_axis(
    steps: list[float], said: list[str]
) -> None:
    panel = draw(chart(1.0, 2.0, steps=steps)).axes[0]
    assert labels(panel.xaxis) == said


def test_any_name_stands_in_the_picture_as_it_is() -> None:
    series = Line("loss", (0.0, 1.0), (1.0, 2.0))
    names = ["_hidden", "$x^$", "<b>&"]
    lines = [replace(series, name=name) for name in names]
    named = Chart("loss", "$x^$ and <b>", "", lines)
    figure = draw(named)
    _add_head(figure, named)
    FigureCanvasAgg(figure).draw()
    said = [text.get_text() for text in figure.texts]
    assert said == [named.title, *(f"{name}  2 at step 1" for name in names)]


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.floats(-LARGEST, LARGEST), min_size=1, max_size=9),
    st.booleans(),
    st.booleans(),
)
def test_whatever_was_logged_is_drawn(
    values: list[float], from_zero: bool, may_be_log: bool
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as `draw_all` does
        figure = draw(chart(*values, from_zero=from_zero, may_be_log=may_be_log))
        FigureCanvasAgg(figure).draw()
    low, high = figure.axes[0].get_ylim()
    assert low <= min(values) <= max(values) <= high
