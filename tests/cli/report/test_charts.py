"""Which charts there are, and what is said of those that are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trainkit import PerSample, PerToken, Uniform, Weighed
from trainkit.cli.report.charts import Line, choose
from trainkit.cli.runs import summary

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
        (
            ["window/noise_scale", "size of the window"],
            "Noise scale",
            [FIRST, SECOND],
        ),
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
