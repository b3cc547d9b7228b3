"""`metrics.csv` by itself."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from trainkit.errors import TrainkitError
from trainkit.lit.logs.metrics_csv import MetricsCSVLogger, row_of


def test_rows_have_a_column_for_each_metric(tmp_path: Path) -> None:
    logger = MetricsCSVLogger(tmp_path / "new" / "folder")
    logger.log_metrics({"loss": 0.1, "epoch": 0}, step=0)
    logger.log_metrics({"lr": torch.tensor(2.0)}, step=1)
    logger.log_metrics({"loss": 1 / 3, "epoch": 1}, step=2)
    logger.log_metrics({})
    with logger.path.open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["step", "epoch", "loss", "lr"],
            ["0", "0", "0.1", ""],
            ["1", "", "", "2.0"],
            ["2", "1", repr(1 / 3), ""],
        ]
    assert logger.num_rows == 3


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -0.0, 1e-300, 10**20, True, "a, b", 'say "so"', "a\nb"],
)
def test_cells_come_back(tmp_path: Path, value: Any) -> None:
    logger = MetricsCSVLogger(tmp_path)
    logger.log_metrics({"x": value, "none": None}, step=4)
    logger.log_metrics({"y": 1.0})
    again = MetricsCSVLogger(tmp_path)
    assert again.rows() == [{"step": "4", "x": str(value)}, {"y": "1.0"}]


def test_another_logger_goes_on_in_the_same_file(tmp_path: Path) -> None:
    MetricsCSVLogger(tmp_path).log_metrics({"a": 1.0}, step=0)
    MetricsCSVLogger(tmp_path).log_metrics({"a": 2.0, "b": 3.0}, step=1)
    assert MetricsCSVLogger(tmp_path).rows() == [
        {"step": "0", "a": "1.0"},
        {"step": "1", "a": "2.0", "b": "3.0"},
    ]


@pytest.mark.parametrize("cut", range(1, 7))
def test_row_that_was_cut_off_goes(tmp_path: Path, cut: int) -> None:
    logger = MetricsCSVLogger(tmp_path)
    for step in range(3):
        logger.log_metrics({"loss": 0.25}, step=step)
    text = logger.path.read_text()
    logger.path.write_text(text[:-cut])
    again = MetricsCSVLogger(tmp_path)
    again.log_metrics({"loss": 0.5}, step=7)
    assert [row["step"] for row in again.rows()] == ["0", "1", "7"]
    assert again.rows()[-1] == {"step": "7", "loss": "0.5"}


def test_killed_while_a_column_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = MetricsCSVLogger(tmp_path)
    logger.log_metrics({"a": 1.0}, step=0)

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        logger.log_metrics({"b": 1.0}, step=1)
    monkeypatch.undo()
    assert MetricsCSVLogger(tmp_path).rows() == [{"step": "0", "a": "1.0"}]


def test_file_is_set_aside_under_a_free_name(tmp_path: Path) -> None:
    for number in (1, 2):
        logger = MetricsCSVLogger(tmp_path)
        logger.log_metrics({"a": float(number)}, step=0)
        assert logger.set_aside().name == f"metrics.{number}.csv"
        assert logger.num_rows == 0
    assert not (tmp_path / "metrics.csv").exists()


def test_what_is_logged_later_for_a_step_joins_its_row(tmp_path: Path) -> None:
    logger = MetricsCSVLogger(tmp_path)
    logger.log_metrics({"loss": 1.0, "lr": 0.5, "val": 3.0, "epoch": 0}, step=1)
    logger.log_metrics({"loss": 2.0}, step=2)
    logger.log_metrics({"loss": 3.0, "epoch": 0}, step=3)
    logger.log_metrics({"lr": 0.25}, step=2)  # late
    logger.log_metrics({"val": 4.0, "epoch": 0}, step=3)
    logger.log_metrics({"val": 4.0}, step=3)  # again
    expected = [
        {"step": "1", "epoch": "0", "loss": "1.0", "lr": "0.5", "val": "3.0"},
        {"step": "2", "loss": "2.0", "lr": "0.25"},
        {"step": "3", "epoch": "0", "loss": "3.0", "val": "4.0"},
    ]
    assert logger.rows() == expected
    assert logger.num_rows == 3
    logger.log_metrics({"loss": 9.0}, step=4)
    assert logger.rows() == [*expected, {"step": "4", "loss": "9.0"}]


def test_a_second_value_for_a_step_begins_another_row(tmp_path: Path) -> None:
    logger = MetricsCSVLogger(tmp_path)
    for value in (1.0, 2.0):
        logger.log_metrics({"val": value}, step=1)
    logger.log_metrics({"lr": 0.5}, step=1)
    assert [row.get("val") for row in logger.rows()] == ["1.0", "2.0"]
    assert logger.rows()[-1]["lr"] == "0.5"


def test_the_file_is_whole_whenever_a_row_has_grown(tmp_path: Path) -> None:
    """One call writes it, so a process that is killed leaves all or nothing of it."""
    logger = MetricsCSVLogger(tmp_path)
    logger.log_metrics({"a": 0.1, "b": 1.0, "c": "ä, ö"}, step=0)
    for step in range(1, 200):
        logger.log_metrics({"a": step / 7}, step=step)
        logger.log_metrics({"c": "ä, ö"}, step=step)
        if step > 3:
            logger.log_metrics({"b": 1.0}, step=step - 3)
    again = MetricsCSVLogger(tmp_path)
    assert [int(row["step"]) for row in again.rows()] == list(range(200))
    assert all(len(row) == 4 for row in again.rows()[:-3])
    again.log_metrics({"b": 1.0}, step=199)  # another process goes on
    assert again.rows()[-1]["b"] == "1.0"
    assert again.num_rows == 200


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TrainkitError, match="save_dir: must be a folder that can be"):
        MetricsCSVLogger(tmp_path / "file").log_metrics({"a": 1.0}, step=1)


def test_row_of_a_step_that_is_not_known() -> None:
    assert row_of({"a": 1}, None) == {"a": "1"}
