"""Columns become lines, lines become charts, and charts are drawn."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread

from tests.cli.report.runs import page_of, run_folder
from trainkit import PerSample, PerToken, Uniform, Weighed
from trainkit.cli.report.charts import LARGEST, MOST, Chart, Line, choose, read_lines
from trainkit.cli.report.drawing import _save, figure_of
from trainkit.cli.runs import summary
from trainkit.pages.look import LIGHT

NAN = math.nan
NUMBERS = st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(NAN)), max_size=100)


def line(numbers: list[float]) -> Line:
    return Line("loss", tuple(map(float, range(len(numbers)))), tuple(numbers))


@settings(max_examples=8)
@given(NUMBERS)
def test_what_is_drawn_keeps_the_extremes_and_the_last_step(
    numbers: list[float],
) -> None:
    assert line(numbers).thinned()[1] == tuple(numbers)
    numbers = [*numbers, *[1.0] * MOST, *numbers, 2.0]
    whole = line(numbers)
    steps, means, *band = whole.thinned()
    assert len(steps) == MOST / 4
    assert list(steps) == sorted(set(steps))
    assert steps[-1] == whole.steps[-1]
    finite = [value for value in numbers if math.isfinite(value)]
    low, high = ([y for y in edge if y == y] for edge in band)
    assert (min(low), max(high)) == (min(finite), max(finite))
    for least, mean, largest in zip(band[0], means, band[1], strict=True):
        room = 1e-9 * max(abs(least), abs(largest))
        assert math.isnan(mean) or least - room <= mean <= largest + room


def test_a_long_gap_stays_a_gap() -> None:
    values = [*[3.0] * MOST, *[NAN] * 500]
    _, means, low, high = Line("", [*range(len(values))], values).thinned()
    assert means[0] == low[0] == high[0] == 3.0
    assert math.isnan(means[-1])


@pytest.mark.parametrize(
    ("row", "known"),
    [
        ({"step": "0", "note": "good", "flag": "True"}, {}),
        ({"loss": "2"}, {}),  # of no step
        ({"step": "x", "loss": "2"}, {}),
        ({"step": "0", "epoch": "1", "loss": "2"}, {"loss": (2.0,)}),
        ({"step": "0", "loss": "nan"}, {}),  # nothing that could be drawn
        ({"step": "0", "loss": "2", None: ["7", "8"]}, {"loss": (2.0,)}),
    ],
)
def test_only_numbers_of_a_step_are_drawn(row: dict, known: dict[str, Any]) -> None:
    found = read_lines([row])
    assert {name: line.values for name, line in found.items()} == known


def test_what_is_not_finite_is_a_gap_and_steps_rise() -> None:
    cells = ["1.5", "nan", "inf", "-inf", "1e251", "-1e251", "2"]
    rows = [{"step": str(n), "loss": cell} for n, cell in enumerate(cells)]
    found = read_lines([*rows[3:], *rows[:3]])["loss"]
    assert found.steps == (0, 1, 2, 3, 4, 5, 6)
    assert found.shown == [(0, 1.5), (6, 2.0)]


TITLES = {
    "window/loss": "Loss",
    "window/weight": "Window weight",
    "window/imbalance": "Imbalance",
    "lr-SGD": "Learning rate",
    "window/micro_batches": "Accumulation",
    "window/grad_norm": "Gradient norm",
    "window/padding": "Padding",
    "window/noise_scale": "Noise scale",
}
FIRST, SECOND, THIRD = ("train", "solid"), ("other1", "dashed"), ("other2", "dashed")
VALIDATION = ("validation", "solid")


def chosen(*names: str, **said: str) -> tuple[list[Any], list[str]]:
    lines = {name: Line(name, (0.0, 1.0), (1.0, 2.0)) for name in names}
    return choose(lines, **said)


@pytest.mark.parametrize("left_out", [None, *TITLES])
def test_each_column_has_its_chart_and_without_it_there_is_none(
    left_out: str | None,
) -> None:
    names = [name for name in reversed(TITLES) if name != left_out]
    charts, others = chosen(*names)
    expected = [title for name, title in TITLES.items() if name != left_out]
    assert [chart.title for chart in charts] == expected
    assert others == []


@pytest.mark.parametrize(
    ("names", "title", "looks"),
    [
        (["window/loss", "val/loss"], "Loss", [FIRST, VALIDATION]),
        (["train_loss_step", "val_loss"], "Loss", [FIRST, VALIDATION]),
        (["valid/loss", "validation/x/loss_epoch"], "Loss", [VALIDATION] * 2),
        ([f"window/{n}/loss" for n in range(3)], "Loss", [FIRST, SECOND, THIRD]),
        (["lr-Adam", "lr-Adam-1"], "Learning rate", [FIRST, SECOND]),
        (["val/acc", "train/acc"], "val/acc and train/acc", [VALIDATION, FIRST]),
        (["critic/loss_of_val"], "critic/loss_of_val", [FIRST]),
    ],
)
def test_what_belongs_together_is_one_chart(
    names: list[str], title: str, looks: list[tuple[str, str]]
) -> None:
    hidden = ["window/seen", "window/0/seen", "window/noise_scale_low"]
    (chart,), _ = chosen(*names, *hidden)
    assert chart.title == title
    assert [line.name for line in chart.lines] == names
    assert [(line.colour, line.dash) for line in chart.lines] == looks


def test_other_metrics_come_last_and_more_than_a_page_holds_are_named() -> None:
    names = ["lr-SGD-momentum", *(f"metric{n}" for n in range(13))]
    charts, left_out = chosen(*names, *TITLES)
    assert [chart.title for chart in charts][len(TITLES) :] == names[:12]
    assert left_out == ["2 more columns: metric11, metric12"]


@pytest.mark.parametrize(
    ("strategy", "unit", "title"),
    [
        (PerToken(), "tokens", "Window weight, in tokens"),
        (PerSample(), "samples", "Window weight, in samples"),
        (Uniform(), "micro-batches", "Window weight, in micro-batches"),
        (Weighed(), "", "Window weight"),  # the module may weigh anything
        (None, "", "Window weight"),
    ],
)
def test_weights_have_a_unit_and_the_title_names_it(
    strategy: Any, unit: str, title: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = strategy and SimpleNamespace(strategy=strategy)
    monkeypatch.setattr(summary, "windows_of", lambda trainer: windows)
    assert summary.unit_of_weights(None) == unit
    (weight,), _ = chosen("window/weight", unit=unit)
    assert weight.title == title


# ---- what stands in a chart, in the page and in its PNG ------------------------------


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


def panel_of(*values: float, steps: Sequence[float] = (), **options: Any) -> Any:
    series = Line("loss", tuple(steps or map(float, range(len(values)))), values)
    return figure_of(Chart("loss", "Loss", "", lines=(series,), **options)).axes[0]


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
    assert not panel.yaxis.get_minorticklabels()  # they would run into the others
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


def test_any_name_stands_in_the_picture_whole_and_as_it_is(tmp_path: Path) -> None:
    series = Line("loss", (0.0, 1.0), (1.0, 2.0))
    names = ["_hidden", "$x^$", "<b>&"]
    widths = []
    for title in ("$x^$ and <b>", "a metric with a very long name of its own and " * 2):
        lines = [replace(series, name=name) for name in names]
        chart = Chart("loss", title, "", lines=lines)
        figure = figure_of(chart)
        _save(figure, chart, tmp_path / "pictures" / "loss.png")
        said = [text.get_text() for text in reversed(figure.texts)]
        assert said == [title, *(f"{name}  2 at step 1" for name in names)]
        widths.append(imread(tmp_path / "pictures" / "loss.png").shape[1])
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
