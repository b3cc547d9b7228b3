"""Which charts there are, and what is said of those that are not."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from trainkit.cli.report.chart import Chart, Charts
from trainkit.cli.report.charts import choose
from trainkit.cli.report.line import Line

WINDOW = ["loss", "weight", "micro_batches", "imbalance", "uniform_gap", "padding"]
ALL = [f"window/{name}" for name in [*WINDOW, "grad_norm"]] + ["lr-SGD", "val/loss"]
TITLES = [
    "Loss",
    "Window weight",
    "Imbalance",
    "Learning rate",
    "Accumulation",
    "Gradient norm",
    "Padding",
    "Uniform gap",
]


def charts(names: Iterable[str], plan: Iterable[str] = (), why: str = "") -> Charts:
    columns = {name: Line(name, (0.0, 1.0), (1.0, 2.0)) for name in names}
    planned = {name: Line(name, (0.0, 1.0), (1.0, 2.0)) for name in plan}
    return choose(columns, planned, why_no_plan=why)


def chart(found: Charts, title: str) -> Chart:
    return next(each for each in found.shown if each.title == title)


def lines(found: Charts, title: str) -> list[tuple[str, str]]:
    return [(line.name, line.colour) for line in chart(found, title).lines]


def test_a_run_with_everything_has_every_chart_and_no_excuse() -> None:
    found = charts(ALL, plan=["lr-SGD"])
    assert [each.title for each in found.shown] == TITLES
    assert not found.left_out
    assert lines(found, "Loss") == [
        ("window/loss", "train"),
        ("val/loss", "validation"),
    ]
    assert lines(found, "Learning rate") == [
        ("lr-SGD, planned", "plan"),
        ("lr-SGD", "train"),
    ]


def test_what_was_not_logged_is_not_drawn() -> None:
    found = charts([name for name in ALL if name not in ("lr-SGD", "window/padding")])
    assert {each.title for each in found.shown} == {*TITLES} - {
        "Learning rate",
        "Padding",
    }


def test_without_windows_the_loss_is_that_of_the_module() -> None:
    found = charts(["train/loss", "val/loss"])
    assert [each.title for each in found.shown] == ["Loss"]


@pytest.mark.parametrize("name", ["val_loss", "valid/loss", "validation/loss_epoch"])
def test_a_validation_loss_by_another_name(name: str) -> None:
    found = charts(["window/loss", name])
    assert lines(found, "Loss")[1:] == [(name, "validation")]


def test_several_optimizers_have_a_line_each() -> None:
    found = charts(["window/0/loss", "window/1/loss", "lr-Adam", "lr-Adam-1"])
    assert lines(found, "Loss") == [
        ("window/0/loss", "train"),
        ("window/1/loss", "other1"),
    ]
    rates = [colour for _, colour in lines(found, "Learning rate")]
    assert rates == ["train", "other1"]


def test_why_there_is_no_plan_is_said() -> None:
    found = charts(["lr-SGD"], why="ReduceLROnPlateau goes by a metric")
    note = chart(found, "Learning rate").note
    assert note == "No plan: ReduceLROnPlateau goes by a metric."
    assert chart(charts(["lr-SGD"], plan=["lr-SGD"]), "Learning rate").note == ""


def test_other_metrics_come_last_those_of_a_name_together() -> None:
    names = ["val/acc", "train/acc", "critic/real", "window/seen", "window/0/seen"]
    found = charts([*ALL, *names, "lr-SGD-momentum"])
    others = [each.title for each in found.shown][len(TITLES) :]
    assert others == ["val/acc and train/acc", "critic/real", "lr-SGD-momentum"]


def test_more_metrics_than_a_page_holds_are_named() -> None:
    found = charts([*ALL, *(f"metric{n}" for n in range(14))])
    assert len(found.shown) == len(TITLES) + 12
    assert found.left_out == ["2 more columns: metric12, metric13"]
    keys = [each.key for each in found.shown]
    assert len(keys) == len(set(keys))


def test_a_weight_has_its_unit() -> None:
    columns = {"window/weight": Line("window/weight", (0.0, 1.0), (1.0, 2.0))}
    titles = [choose(columns, {}, unit=u).shown[0].title for u in ("tokens", "")]
    assert titles == ["Window weight, in tokens", "Window weight"]
