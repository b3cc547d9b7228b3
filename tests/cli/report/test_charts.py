"""Columns become lines, and lines become charts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit import PerSample, PerToken, Uniform, Weighed
from trainkit.cli.report.charts import (
    MOST,
    Line,
    choose,
    noise_lines,
    read_lines,
    window_sizes,
)
from trainkit.cli.runs import summary

NAN = math.nan
NUMBERS = st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(NAN)), max_size=100)


def line(numbers: list[float]) -> Line:
    return Line("loss", tuple(map(float, range(len(numbers)))), tuple(numbers))


@settings(max_examples=8)
@given(NUMBERS)
def test_what_is_drawn_keeps_the_extremes_and_the_last_step(
    numbers: list[float],
) -> None:
    assert line(numbers).thinned().values == tuple(numbers)
    numbers = [*numbers, *[1.0] * MOST, *numbers, 2.0]
    whole = line(numbers)
    drawn = whole.thinned()
    assert len(drawn.steps) == MOST / 4
    assert list(drawn.steps) == sorted(set(drawn.steps))
    assert drawn.steps[-1] == whole.steps[-1]
    finite = [value for value in numbers if math.isfinite(value)]
    low, high = ([y for y in edge if y == y] for edge in (drawn.low, drawn.high))
    assert (min(low), max(high)) == (min(finite), max(finite))
    for least, mean, largest in zip(drawn.low, drawn.values, drawn.high, strict=True):
        room = 1e-9 * max(abs(least), abs(largest))
        assert math.isnan(mean) or least - room <= mean <= largest + room


def test_a_long_line_keeps_its_own_band_and_a_long_gap() -> None:
    values = [*[3.0] * MOST, *[NAN] * 500]
    low, high = [1.0] * len(values), [9.0] * len(values)
    drawn = Line("", [*range(len(values))], values, low, high).thinned()
    assert ({*drawn.low}, {*drawn.high}) == ({1.0}, {9.0})
    assert math.isnan(drawn.values[-1])


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


def noise(
    *, seen: bool = True, more: Mapping[int, dict[str, Any]] | None = None
) -> dict[str, Line]:
    """40 windows of 32 samples, from the 21st on of 128; every tenth is measured."""
    found, samples = [], 0
    for step in range(1, 41):
        samples += 32 if step <= 20 else 128
        row: dict[str, Any] = {"step": step, "window/loss": 1}
        if seen:
            row["window/samples_seen"] = samples
        if step % 10 == 0:
            row["window/noise_scale"] = 100 + step
            row |= {"window/noise_scale_low": 80, "window/noise_scale_high": 200}
            row |= (more or {}).get(step, {})
        found.append({name: str(cell) for name, cell in row.items()})
    return read_lines(found)


@pytest.mark.parametrize(
    ("end", "high"),
    [
        ({}, 200),
        ({"window/noise_scale_high": 1e9}, 4 * 140),  # the top of the axis
        ({"window/noise_scale_high": math.inf}, 4 * 140),
        ({"window/noise_scale_high": ""}, 4 * 140),
    ],
)
def test_the_noise_scale_has_its_band_and_the_window_beside_it(
    end: dict[str, Any], high: float
) -> None:
    scale, window = noise_lines(noise(more={20: end})).values()
    assert scale.shown == [(10, 110), (20, 120), (30, 130), (40, 140)]
    assert scale.low == [80] * 4
    assert scale.high == [200, high, 200, 200]
    assert window.name == "size of the window"
    assert window.shown[18:22] == [(19, 32), (20, 32), (21, 128), (22, 128)]


@pytest.mark.parametrize("unknown", ["inf", "0"])
def test_a_scale_that_is_not_known_is_a_gap_and_none_is_no_line(unknown: str) -> None:
    gap = {"window/noise_scale": unknown, "window/noise_scale_low": 0}
    scale, _ = noise_lines(noise(more={30: gap})).values()
    assert [step for step, _ in scale.shown] == [10, 20, 40]
    assert scale.low == [80, 80, 8, 80]  # a quarter of the window
    nothing = {step: {"window/noise_scale": "0"} for step in range(10, 50, 10)}
    assert noise_lines(noise(more=nothing)) == {}
    assert list(noise_lines(noise(seen=False))) == ["window/noise_scale"]
    assert noise_lines({"loss": line([1.0])}) == {}


def test_windows_that_are_not_logged_are_shared_out_evenly() -> None:
    every_tenth = Line("", (1.0, 10.0, 20.0), (8.0, 80.0, 240.0))
    sizes = window_sizes({"window/samples_seen": every_tenth})
    assert sizes == {1.0: 8.0, 10.0: 8.0, 20.0: 16.0}


TITLES = {
    "window/loss": "Loss",
    "window/weight": "Window weight",
    "tokens per second": "Throughput, in tokens per second",
    "window/imbalance": "Imbalance",
    "lr-SGD": "Learning rate",
    "window/micro_batches": "Accumulation",
    "window/grad_norm": "Gradient norm",
    "window/padding": "Padding",
    "window/uniform_gap": "Uniform gap",
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
        (
            ["window/0/loss", "window/1/loss", "window/2/loss"],
            "Loss",
            [FIRST, SECOND, THIRD],
        ),
        (["lr-Adam", "lr-Adam-1"], "Learning rate", [FIRST, SECOND]),
        (["window/noise_scale", "size of the window"], "Noise scale", [FIRST, SECOND]),
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


def test_the_title_names_the_unit_of_weights() -> None:
    for unit, title in (("tokens", "Window weight, in tokens"), ("", "Window weight")):
        (weight,), _ = chosen("window/weight", unit=unit)
        assert weight.title == title


@pytest.mark.parametrize(
    ("strategy", "unit"),
    [
        (PerToken(), "tokens"),
        (PerSample(), "samples"),
        (Uniform(), "micro-batches"),
        (Weighed(), ""),  # the module may weigh anything
        (None, ""),
    ],
)
def test_weights_have_a_unit(
    strategy: Any, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = strategy and SimpleNamespace(strategy=strategy)
    monkeypatch.setattr(summary, "windows_of", lambda trainer: windows)
    assert summary.unit_of_weights(None) == unit
