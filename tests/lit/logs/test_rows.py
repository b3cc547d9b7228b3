"""Rows of metrics: the file that keeps them, and the steps that they have."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback, LearningRateMonitor
from lightning.pytorch.demos.boring_classes import BoringModel

from tests.helpers import TokenModule, loader, ragged_sequences, trainer
from tests.lit.logs.test_monitor import NeverThere
from tests.zoo.callbacks import Saving, Table, told
from tests.zoo.modules import Gan, Manual, hooked
from trainkit import (
    AccumulationCallback,
    LearningRates,
    OneStep,
    PerToken,
    WindowMonitor,
)
from trainkit.errors import TrainkitError
from trainkit.lit.logs import monitor
from trainkit.lit.logs.metrics_csv import (
    MetricRows,
    MetricsCSVLogger,
    Row,
    _cut,
    row_of,
)


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


def test_a_row_that_a_checkpoint_brings_forward_keeps_its_step(tmp_path: Path) -> None:
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
    with pytest.raises(OSError, match=str(tmp_path / "file")):
        logged(tmp_path / "file", (1, {"a": 1.0}))
    with pytest.raises(TrainkitError, match="save_dir: must be a folder, received 3"):
        MetricsCSVLogger(3)  # type: ignore[arg-type]
    logger = logged(tmp_path, (0, {"a": 1.0}))
    with pytest.warns(UserWarning, match="has 1 of the 3 rows that the checkpoint"):
        _cut(logger, 3)
    assert [row["step"] for row in logger.rows()] == ["0"]


# ---- the steps of rows: Lightning's own, or one row for each optimizer step, from 1 --


DATA = ragged_sequences(38)  # ten batches of four: windows of 4, 4 and 2
EACH_STEP: dict[str, Any] = {"log_every_n_steps": 1, "max_epochs": 1}


class Validates(TokenModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", loss)
        self.log("train/mean", loss, on_step=False, on_epoch=True, batch_size=1)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", super().training_step(batch, batch_idx), batch_size=1)

    def val_dataloader(self) -> Any:
        return loader(DATA, 16)


def rows(
    where: Path, *more: Callback, module: Any = None, every: int = 1, **options: Any
) -> list[Row]:
    """What is logged; a module of ours brings its windows itself."""
    logger = MetricsCSVLogger(where)
    plain = [LearningRates(logging_interval="step"), AccumulationCallback(PerToken())]
    callbacks = [*([] if module else plain), WindowMonitor(every), *more]
    how: dict[str, Any] = {"accumulate": 4, **EACH_STEP, "max_epochs": 2, **options}
    fit = trainer(logger=logger, callbacks=callbacks, **how)
    fit.fit(module or Validates(), loader(DATA, 4))
    return logger.rows()


def steps(found: list[Row], name: str = "step") -> list[int]:
    return [int(row["step"]) for row in found if name in row]


def test_a_row_has_all_of_its_step(tmp_path: Path, monkeypatch: Any) -> None:
    """Also of windows that arrive late. The control: Lightning counts from 0."""
    found = rows(tmp_path / "a", OneStep(), val_check_interval=4)
    assert steps(found) == [1, 2, 3, 4, 5, 6]
    for name in ("window/loss", "window/grad_norm", "lr-SGD", "train/loss"):
        assert steps(found, name) == [1, 2, 3, 4, 5, 6]
    assert steps(found, "val/loss") == [1, 2, 4, 5]
    assert steps(found, "train/mean") == [3, 6]
    assert steps(rows(tmp_path / "b")) == [0, 1, 2, 3, 4, 5]
    monkeypatch.setattr(monitor, "LateReading", NeverThere)
    assert rows(tmp_path / "c", OneStep(), val_check_interval=4) == found


@pytest.mark.filterwarnings("ignore:.*no learning rate schedulers")
@pytest.mark.parametrize(
    ("kind", "logged"),
    [(LearningRates, [0, 1, 2]), (LearningRateMonitor, [0] * 4 + [1] * 4 + [2] * 2)],
)
def test_rates_are_logged_once_a_step(kind: Any, logged: list[int]) -> None:
    """The control is Lightning's own, which logs them before each micro-batch."""
    table, ours = Table(), AccumulationCallback(PerToken())
    how: dict[str, Any] = {"logger": table, **EACH_STEP}
    fit = trainer(4, callbacks=[kind(logging_interval="step"), ours], **how)
    fit.fit(TokenModule(), loader(DATA, 4))
    assert [row["step"] for row in table.rows if "lr-SGD" in row] == logged


def test_each_nth_window_is_logged_once_with_the_modules_own(tmp_path: Path) -> None:
    """lightning#6359: global_step stays for N batches, and the log fired N times."""
    every: Any = {"log_every_n_steps": 3, "max_epochs": 3, "every": 3}
    found = rows(tmp_path / "a", **every)
    assert steps(found, "window/loss") == [0, 2, 5, 8]
    assert steps(found, "train/loss") == [2, 5, 8]
    found = rows(tmp_path / "b", OneStep(), **every)
    assert steps(found, "train/loss") == steps(found, "lr-SGD") == [3, 6, 9]
    assert steps(found, "window/loss") == [1, 3, 6, 9]


def test_what_is_logged_by_hand_has_the_step_too(tmp_path: Path) -> None:
    """As users do, with whatever step. After the training the logger is as before."""

    def log(trainer: Any, *args: Any) -> None:
        trainer.logger.log_metrics({"mine": 1.0}, step=1000)

    by_hand = LambdaCallback(on_train_batch_end=log)
    found = rows(tmp_path, OneStep(), by_hand, max_epochs=1)
    assert steps(found, "mine") == steps(found) == [0, 1, 2, 3]  # 0: before a step
    logger = MetricsCSVLogger(tmp_path)
    fit = trainer(4, logger=logger, callbacks=[OneStep()], **EACH_STEP)
    fit.fit(TokenModule(), loader(DATA, 4))
    logger.log_metrics({"a": torch.tensor(1.0)}, step=77)
    assert steps(logger.rows(), "a") == [77]


def test_steps_of_all_optimizers_count(tmp_path: Path) -> None:
    """Windows of two and of three micro-batches; both end with the epoch. Without
    `OneStep` they are Lightning's, which counts batches here."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        Gan.training_step(self, batch, batch_idx)
        self.log("mine", float(batch_idx))

    TwoOptimizers = hooked(Gan, training_step=training_step)
    how: dict[str, Any] = {"max_epochs": 1, "accumulate": 1}
    found = rows(tmp_path / "a", OneStep(), module=TwoOptimizers(), **how)
    assert steps(found, "window/0/loss") == [1, 3, 4, 6, 8]
    assert steps(found, "window/1/loss") == [2, 5, 7, 9]
    found = rows(tmp_path / "b", module=TwoOptimizers(), **how)
    mine = steps(found, "mine")
    assert steps(found, "window/0/loss") == [mine[i] for i in (1, 3, 5, 7, 9)]
    assert steps(found, "window/1/loss") == [mine[i] for i in (2, 5, 8, 9)]


class SeveralSteps(Manual):
    """One optimizer that steps twice in a batch."""

    every = 1

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for _ in range(2):
            super().training_step(batch, batch_idx)


def test_no_window_is_lost_where_a_batch_makes_several_steps(tmp_path: Path) -> None:
    how: dict[str, Any] = {"max_epochs": 1, "accumulate": 1}
    found = rows(tmp_path, OneStep(), module=SeveralSteps(), **how)
    assert steps(found, "window/loss") == list(range(1, 21))


def test_callbacks_see_the_last_window_that_has_closed(tmp_path: Path) -> None:
    """Also one that is not logged; of the others the last that was."""
    seen: list[dict[str, float]] = []

    def read(trainer: Any, *args: Any) -> None:
        found = trainer.callback_metrics.items()
        seen.append({k: float(v) for k, v in found if "window" in k})

    all_rows = [r for r in rows(tmp_path / "a", OneStep()) if "window/loss" in r]
    reader = LambdaCallback(on_train_batch_end=read)
    rows(tmp_path / "b", OneStep(), reader, every=50)
    for row, batch in zip(all_rows, (3, 7, 9, 13, 17, 19), strict=True):
        for name in ("window/loss", "window/weight"):
            assert seen[batch][name] == float(row[name])
        first = float(all_rows[0]["window/grad_norm"])
        assert seen[batch]["window/grad_norm"] == pytest.approx(first)
    assert "window/loss" not in seen[2]  # no window has closed
