"""What stands in a chart, in the page and in its PNG."""

from __future__ import annotations

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
from trainkit.cli.report.charts import LARGEST, Chart, Line
from trainkit.cli.report.drawing import _save, figure_of
from trainkit.pages.look import LIGHT


def test_each_chart_has_a_png_with_its_lines(tmp_path: Path) -> None:
    rows = [{"step": n, "window/loss": 3.0 - n, "val/loss": 1.0} for n in range(3)]
    folder = run_folder(tmp_path, [*rows, {"step": 3, "window/weight": 8}])
    page_of(folder, pictures=True)
    names = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert names == {"loss.png", "weight.png"}
    pixels = (imread(tmp_path / "pictures" / "loss.png")[..., :3] * 255).round()
    colours = {tuple(map(int, each)) for each in pixels.reshape(-1, 3)}
    for style in ("train", "validation"):
        red, green, blue = (int(LIGHT[style][at : at + 2], 16) for at in (1, 3, 5))
        assert (red, green, blue) in colours


def test_each_metric_has_a_png_of_its_own_and_other_files_stay(tmp_path: Path) -> None:
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
    return Chart("loss", "Loss", "", lines=(series,), **options)


def panel_of(*values: float, **options: Any) -> Any:
    return figure_of(chart(*values, **options)).axes[0]


def labels(axis: Axis) -> list[str]:
    """What stands along it, and a check that no text runs into the next."""
    low, high = sorted(axis.get_view_interval())
    places = zip(axis.get_majorticklocs(), axis.get_ticklabels(), strict=True)
    shown = [text for place, text in places if low <= place <= high]
    renderer = FigureCanvasAgg(axis.axes.figure).get_renderer()  # type: ignore[arg-type]
    boxes = [text.get_window_extent(renderer) for text in shown if text.get_text()]
    assert not any(a.overlaps(b) for a, b in zip(boxes, boxes[1:], strict=False))
    return [text.get_text() for text in shown]


SHARE, ZERO = {"is_share": True}, {"from_zero": True}


@pytest.mark.parametrize(
    ("values", "options", "scale", "said"),
    [
        ([0.5, 20.0], {}, "log", "0.5 1 2 5 10 20"),
        ([1e-4, 10], {}, "log", "0.0001 0.001 0.01 0.1 1 10"),
        ([-1.0, 50.0], {}, "linear", "0 10 20 30 40 50"),
        ([0.0, 0.2], SHARE, "linear", "0% 5% 10% 15% 20%"),
        ([0.0, 7.0], ZERO, "linear", "0 2 4 6"),
        ([1.0, 1.0], {}, "linear", "0.9 0.95 1 1.05 1.1"),
        ([0.0, 0.0], ZERO, "linear", "0 0.2 0.4 0.6 0.8 1"),
        ([2.0, 2.0], ZERO, "linear", "0 0.5 1 1.5 2"),
        ([2e6, 1.8e6], {}, "linear", "1,800,000 1,850,000 1,900,000 1,950,000 2e6"),
    ],
)
def test_numbers_along_the_axis_are_round(
    values: list[float], options: dict[str, Any], scale: str, said: str
) -> None:
    panel = panel_of(*values, **options)
    stairs = panel_of(*values, as_stairs=True, **options)  # hold until the next
    styles = [each.lines[0].get_drawstyle() for each in (panel, stairs)]
    assert styles == ["default", "steps-post"]
    frame = [side for side, each in panel.spines.items() if each.get_visible()]
    assert not {"top", "right"} & {*frame}
    assert panel.get_yscale() == scale
    assert labels(panel.yaxis) == said.replace("2e6", "2,000,000").split()


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (3, "0 1 2 3"),  # there is no half a step
        (0, "0"),
        (40, "0 10 20 30 40"),
        (2_345_678, "0 500,000 1,000,000 1,500,000 2,000,000"),
    ],
)
def test_steps_are_whole_numbers_along_the_axis(last: float, said: str) -> None:
    assert labels(panel_of(1.0, 2.0, steps=[0, last]).xaxis) == said.split()


def test_any_name_stands_in_the_picture_as_it_is(tmp_path: Path) -> None:
    series = Line("loss", (0.0, 1.0), (1.0, 2.0))
    names = ["_hidden", "$x^$", "<b>&"]
    lines = [replace(series, name=name) for name in names]
    named = Chart("loss", "$x^$ and <b>", "", lines=lines)
    figure = figure_of(named)
    _save(figure, named, tmp_path / "pictures" / "loss.png")
    said = [text.get_text() for text in reversed(figure.texts)]
    assert said == [named.title, *(f"{name}  2 at step 1" for name in names)]


def test_a_picture_is_as_wide_as_its_title(tmp_path: Path) -> None:
    lines = [Line("loss", (0.0, 1.0), (1.0, 2.0))]
    widths = []
    for title in ("short", "a metric with a very long name of its own and " * 2):
        chart = Chart("loss", title, "", lines=lines)
        _save(figure_of(chart), chart, tmp_path / "loss.png")
        widths.append(imread(tmp_path / "loss.png").shape[1])
    assert widths[1] > 1.2 * widths[0]


VALUES = st.lists(st.floats(-LARGEST, LARGEST), min_size=1, max_size=9)


@settings(max_examples=10)
@given(VALUES, st.booleans())
def test_whatever_was_logged_is_drawn(values: list[float], from_zero: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as `draw` does
        panel = panel_of(*values, from_zero=from_zero)
        FigureCanvasAgg(panel.figure).draw()
    low, high = panel.get_ylim()
    assert low <= min(values) <= max(values) <= high
