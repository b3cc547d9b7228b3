"""The chart of the noise scale: its band, its axes, and what has no gap."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cli.report.runs import (
    WINDOW,
    charts_of,
    legends,
    page_of,
    run_folder,
    titles,
)
from trainkit.cli.report.chart import Chart
from trainkit.cli.report.drawing import draw
from trainkit.cli.report.line import Line, read_lines
from trainkit.cli.report.noise import curve
from trainkit.cli.report.noise_chart import noise_chart, window_sizes
from trainkit.cli.runs.folder import RunFolder
from trainkit.core.noise.advice import Point
from trainkit.pages.look import LIGHT

Row = dict[str, Any]


def rows(
    count: int = 40, *, seen: bool = True, noise: Mapping[int, Row] | None = None
) -> list[Row]:
    """Windows of 32 samples, from the 21st on of 128; every tenth is measured."""
    found, samples = [], 0
    for step in range(1, count + 1):
        samples += 32 if step <= 20 else 128
        row: Row = {"step": step, **WINDOW}
        if seen:
            row["window/samples_seen"] = samples
        if step % 10 == 0:
            row |= {
                "window/noise_scale": 100 + step,
                "window/noise_scale_low": 80.0,
                "window/noise_scale_high": 200.0,
                "window/efficiency": 0.5,
            } | (noise or {}).get(step, {})
        found.append(row)
    return found


def columns(*args: Any, **options: Any) -> dict[str, Line]:
    texts = [{k: str(v) for k, v in row.items()} for row in rows(*args, **options)]
    return read_lines(texts)


def chart_of(path: Path, **options: Any) -> Chart:
    shown = charts_of(run_folder(path, rows(**options))).shown
    return next(chart for chart in shown if chart.title == "Noise scale")


def points(line: Line) -> list[tuple[float, float]]:
    return list(zip(line.steps, line.values, strict=True))


def edges(line: Line) -> list[list[float]]:
    return [list(line.low), list(line.high)]


def test_the_band_and_the_window_lie_over_the_samples(tmp_path: Path) -> None:
    chart = chart_of(tmp_path)
    assert (chart.over, chart.axis) == ("samples seen", "log")
    scale, window = chart.lines
    seen = [320, 640, 1920, 3200]
    assert points(scale) == list(zip(seen, [110, 120, 130, 140], strict=True))
    assert edges(scale) == [[80] * 4, [200] * 4]
    assert window.name == "size of the window"
    assert points(window)[18:22] == [(608, 32), (640, 32), (768, 128), (896, 128)]
    assert not window.low


def test_without_samples_it_lies_over_steps(tmp_path: Path) -> None:
    chart = chart_of(tmp_path, seen=False)
    assert (chart.over, len(chart.lines)) == ("step", 1)
    assert [step for step, _ in points(chart.lines[0])] == [10, 20, 30, 40]


def test_with_some_samples_unknown_it_lies_over_steps() -> None:
    for lost, over in ((17, "samples seen"), (20, "step")):  # 17 was not measured
        texts = [{k: str(v) for k, v in row.items()} for row in rows()]
        texts[lost - 1]["window/samples_seen"] = ""
        chart = noise_chart(read_lines(texts))
        assert chart is not None
        assert chart.over == over


def test_windows_that_are_not_measured_are_no_gaps(tmp_path: Path) -> None:
    page = page_of(run_folder(tmp_path, rows()))
    assert "no finite value" not in page
    assert "window/efficiency" in titles(page)
    assert not {"window/noise_scale_low", "window/noise_scale"} & set(titles(page))
    lacking = [{k: v for k, v in row.items()} for row in rows()]
    del lacking[3]["window/loss"]  # the control: WindowMonitor's column has one
    page = page_of(run_folder(tmp_path / "other", lacking))
    assert "window/loss: 1 row has no finite value: a gap." in page


def test_a_run_without_it_has_no_chart_and_no_remark(tmp_path: Path) -> None:
    page = page_of(run_folder(tmp_path, [{"step": n, **WINDOW} for n in range(3)]))
    assert "oise scale" not in page


def test_an_open_end_goes_to_the_top(tmp_path: Path) -> None:
    open_ends = {
        10: {"window/noise_scale_high": math.inf},
        20: {"window/noise_scale_high": ""},
        30: {"window/noise_scale": math.inf, "window/noise_scale_high": math.inf},
    }
    (scale, _) = chart_of(tmp_path, noise=open_ends).lines
    top = 4 * 140
    assert scale.shown == [(320, 110), (640, 120), (3200, 140)]
    assert edges(scale) == [[80] * 4, [top, top, top, 200]]
    page = page_of(RunFolder(tmp_path))
    assert "window/noise_scale: 1 row has no finite value: a gap." in page
    assert "the band ends at the top" in page


def test_what_a_logarithm_does_not_know_is_drawn_at_the_bottom(tmp_path: Path) -> None:
    none = {10: {"window/noise_scale": 0.0, "window/noise_scale_low": 0.0}}
    scale, _ = chart_of(tmp_path, noise=none).lines
    assert math.isnan(scale.values[0])
    assert edges(scale)[0] == [8, 80, 80, 80]  # a quarter of the window
    no_scale = {step: {"window/noise_scale": 0.0} for step in (10, 20, 30, 40)}
    assert noise_chart(columns(noise=no_scale)) is None


def test_the_picture_has_the_band_on_a_logarithmic_axis() -> None:
    chart = noise_chart(columns())
    assert chart is not None
    panel = draw(chart, 1000).axes[0]
    assert panel.get_yscale() == "log"
    assert panel.get_xlabel() == "samples seen"
    (band,) = panel.collections
    (path,) = band.get_paths()
    assert (path.get_extents().y0, path.get_extents().y1) == (80, 200)
    low, high = panel.get_ylim()
    assert low < 32 < 200 < high
    assert [line.get_color() for line in panel.lines] == [
        LIGHT["train"],
        LIGHT["other1"],
    ]


def test_a_long_line_keeps_its_own_band() -> None:
    chart = noise_chart(columns(20_000))
    assert chart is not None
    scale, window = (chart.drawn(line, 400) for line in chart.lines)
    assert len(scale.steps) <= 402
    assert {*scale.low} == {80.0}
    assert {*scale.high} == {200.0}
    assert scale.values[-1] == 20_100
    assert any("Lines of up to 20,000 values" in note for note in chart.notes(400))
    assert max(window.high) == 128


def test_it_is_said_over_what_it_lies(tmp_path: Path) -> None:
    page = page_of(run_folder(tmp_path, rows()))
    said = legends(page)["Noise scale"]["window/noise_scale"]
    assert said == "140 (80 to 200) at 3,200 samples seen"
    assert "<td>320 to 3,200 samples seen</td>" in page
    assert "its last row is of step 40" in page  # and not of step 3,200
    steps = page_of(run_folder(tmp_path / "steps", rows(seen=False)))
    said = legends(steps)["Noise scale"]["window/noise_scale"]
    assert said == "140 (80 to 200) at step 40"  # the control


@pytest.mark.parametrize("seen", [True, False])
def test_the_curve_has_the_window_at_each_measured_step(seen: bool) -> None:
    found = curve(columns(seen=seen), 77.0)
    windows = [32, 32, 128, 128] if seen else [77] * 4
    assert found == [
        Point(step, 100 + step, window)
        for step, window in zip((10, 20, 30, 40), windows, strict=True)
    ]
    assert curve({}, 77.0) == []


def test_windows_that_are_not_logged_are_shared_out_evenly() -> None:
    every_tenth = Line("", (1.0, 10.0, 20.0), (8.0, 80.0, 240.0))
    assert window_sizes(every_tenth) == {1.0: 8.0, 10.0: 8.0, 20.0: 16.0}
