"""`metrics.csv` by itself."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from tests.helpers import trainer
from tests.zoo.callbacks import Saving, told
from trainkit.errors import TrainkitError
from trainkit.lit.logs.metrics_csv import MetricRows, MetricsCSVLogger, _cut, row_of


def logged(folder: Path, *rows: tuple[int, dict[str, Any]]) -> MetricsCSVLogger:
    logger = MetricsCSVLogger(folder)
    for step, metrics in rows:
        logger.log_metrics(metrics, step=step)
    return logger


def test_rows_have_a_column_for_each_metric(tmp_path: Path) -> None:
    logger = logged(
        tmp_path / "new" / "folder",
        (0, {"loss": 0.1, "epoch": 0}),
        (1, {"lr": torch.tensor(2.0)}),
        (2, {"loss": 1 / 3, "epoch": 1}),
        (3, {}),
    )
    with logger.path.open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["step", "epoch", "loss", "lr"],
            ["0", "0", "0.1", ""],
            ["1", "", "", "2.0"],
            ["2", "1", repr(1 / 3), ""],
        ]
    assert logger.num_rows == 3
    assert logger.log_dir == logger.save_dir == str(tmp_path / "new" / "folder")
    assert row_of({"a": 1}, None) == {"a": "1"}


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -0.0, 1e-300, 10**20, True, "a, b", 'say "so"', "a\nb"],
)
def test_cells_come_back_and_another_logger_goes_on(tmp_path: Path, value: Any) -> None:
    logged(tmp_path, (4, {"x": value, "none": None}))
    logged(tmp_path, (5, {"x": 2.0, "y": 3.0}))
    assert MetricsCSVLogger(tmp_path).rows() == [
        {"step": "4", "x": str(value)},
        {"step": "5", "x": "2.0", "y": "3.0"},
    ]


@pytest.mark.parametrize("cut", range(1, 7))
def test_row_that_was_cut_off_goes(tmp_path: Path, cut: int) -> None:
    logger = logged(tmp_path, *((step, {"loss": 0.25}) for step in range(3)))
    logger.path.write_text(logger.path.read_text()[:-cut])
    again = logged(tmp_path, (7, {"loss": 0.5}))
    assert [row["step"] for row in again.rows()] == ["0", "1", "7"]
    assert again.rows()[-1] == {"step": "7", "loss": "0.5"}


def test_killed_while_a_column_is_added(tmp_path: Path, monkeypatch: Any) -> None:
    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    logger = logged(tmp_path, (0, {"a": 1.0}))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            logger.log_metrics({"b": 1.0}, step=1)
    assert MetricsCSVLogger(tmp_path).rows() == [{"step": "0", "a": "1.0"}]


def test_file_is_set_aside_under_a_free_name(tmp_path: Path) -> None:
    for number in (1, 2):
        logger = logged(tmp_path, (0, {"a": float(number)}))
        assert logger.set_aside().name == f"metrics.{number}.csv"
        assert logger.num_rows == 0
    assert not (tmp_path / "metrics.csv").exists()


def test_that_rows_of_another_training_are_set_aside_is_told(tmp_path: Path) -> None:
    logged(tmp_path, (0, {"a": 1.0}))
    own = {"logger": MetricsCSVLogger(tmp_path), "callbacks": [MetricRows()]}
    with told("MetricsCSVLogger: ") as said:
        trainer(max_steps=1, **own).fit(BoringModel())
    assert "which are now in metrics.1.csv" in said[0]
    assert len(said) == 1


def test_what_is_logged_later_for_a_step_joins_its_row(tmp_path: Path) -> None:
    """A second value begins another row."""
    logger = logged(
        tmp_path,
        (1, {"loss": 1.0, "lr": 0.5, "val": 3.0, "epoch": 0}),
        (2, {"loss": 2.0}),
        (3, {"loss": 3.0, "epoch": 0}),
        (2, {"lr": 0.25}),  # late
        (3, {"val": 4.0, "epoch": 0}),
        (3, {"val": 4.0}),  # again
    )
    expected = [
        {"step": "1", "epoch": "0", "loss": "1.0", "lr": "0.5", "val": "3.0"},
        {"step": "2", "loss": "2.0", "lr": "0.25"},
        {"step": "3", "epoch": "0", "loss": "3.0", "val": "4.0"},
    ]
    assert logger.rows() == expected
    assert logger.num_rows == 3
    logger.log_metrics({"val": 9.0}, step=3)
    logger.log_metrics({"new": 1.0}, step=3)
    last = {"step": "3", "val": "9.0", "new": "1.0"}
    assert logger.rows() == [*expected, last]


def test_the_file_is_whole_whenever_a_row_has_grown(tmp_path: Path) -> None:
    """One call writes it, so a process that is killed leaves all or nothing of it."""
    logger = logged(tmp_path, (0, {"a": 0.1, "b": 1.0, "c": "ä, ö"}))
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


def test_a_row_that_a_checkpoint_brings_forward_keeps_a_step_of_its_own(
    tmp_path: Path,
) -> None:
    """As Lightning takes a logged "step" for that of the row."""

    class Logs(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log_dict({"step": 10.0 * batch_idx, "x": 1.0})
            return super().training_step(batch, batch_idx)

    found = []
    for saves in ([Saving(tmp_path / "a.ckpt", 2)], []):
        logger = MetricsCSVLogger(tmp_path / str(len(saves)))
        own = {"logger": logger, "callbacks": [MetricRows(), *saves]}
        trainer(max_steps=4, log_every_n_steps=1, **own).fit(Logs())
        found.append([row["step"] for row in logger.rows() if "x" in row])
    assert found[0] == found[1]


def test_a_folder_that_cannot_be_and_rows_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TrainkitError, match="save_dir: must be a folder that can be"):
        logged(tmp_path / "file", (1, {"a": 1.0}))
    logger = logged(tmp_path, (0, {"a": 1.0}))
    with pytest.warns(UserWarning, match="has 1 of the 3 rows that the checkpoint"):
        _cut(logger, 3)
    assert [row["step"] for row in logger.rows()] == ["0"]


def test_folder_that_is_none_is_refused() -> None:
    with pytest.raises(TrainkitError, match="save_dir: must be a folder, received 3"):
        MetricsCSVLogger(3)  # type: ignore[arg-type]
