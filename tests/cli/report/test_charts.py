"""Columns become lines, and lines become charts."""

from __future__ import annotations

import math
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
    read_lines,
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


def test_a_long_gap_stays_a_gap() -> None:
    values = [*[3.0] * MOST, *[NAN] * 500]
    drawn = Line("", [*range(len(values))], values).thinned()
    assert drawn.values[0] == drawn.low[0] == drawn.high[0] == 3.0
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
