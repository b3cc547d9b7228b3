"""One row for each optimizer step, counted from 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from tests.helpers import TokenModule, loader, pad, ragged_sequences, trainer
from tests.lit.logs.test_monitor import NeverThere, Record
from tests.zoo import Gan, Manual
from trainkit import (
    AccumulationCallback,
    LearningRates,
    MetricsCSVLogger,
    PerToken,
    WindowMonitor,
)
from trainkit.lit.logs import monitor
from trainkit.lit.logs.metrics_csv import Row
from trainkit.lit.logs.rows import OneStep

DATA = ragged_sequences(38)  # ten batches of four: windows of 4, 4 and 2
pytestmark = pytest.mark.filterwarnings("ignore:.*no learning rate schedulers")


class Validates(TokenModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", loss)
        self.log("train/mean", loss, on_step=False, on_epoch=True, batch_size=1)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        self.log("val/loss", loss, batch_size=1)

    def val_dataloader(self) -> Any:
        return loader(DATA, 16)


def rows(where: Path, *more: Callback, **options: Any) -> list[Row]:
    logger = MetricsCSVLogger(where)
    callbacks = [
        LearningRates(logging_interval="step"),
        AccumulationCallback(PerToken()),
        WindowMonitor(1),
        *more,
    ]
    options = {"log_every_n_steps": 1, "max_epochs": 2} | options
    fit = trainer(4, logger=logger, callbacks=callbacks, **options)
    fit.fit(Validates(), loader(DATA, 4))
    return logger.rows()


def steps(found: list[Row], name: str = "step") -> list[int]:
    return [int(row["step"]) for row in found if name in row]


def test_a_row_has_all_of_its_step(tmp_path: Path) -> None:
    found = rows(tmp_path, OneStep(), val_check_interval=4)
    assert steps(found) == [1, 2, 3, 4, 5, 6]
    for name in ("window/loss", "window/grad_norm", "lr-SGD", "train/loss"):
        assert steps(found, name) == [1, 2, 3, 4, 5, 6]
    assert steps(found, "val/loss") == [1, 2, 4, 5]
    assert steps(found, "train/mean") == [3, 6]


def test_by_itself_lightning_counts_from_0(tmp_path: Path) -> None:
    """Negative control."""
    assert steps(rows(tmp_path)) == [0, 1, 2, 3, 4, 5]


def test_windows_that_arrive_late_join_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = rows(tmp_path / "a", OneStep())
    monkeypatch.setattr(monitor, "LateReading", NeverThere)
    assert rows(tmp_path / "b", OneStep()) == at_once


def test_every_nth_window_joins_what_lightning_logs(tmp_path: Path) -> None:
    every: Any = {"log_every_n_steps": 3, "max_epochs": 3}
    found = rows(tmp_path, OneStep(), WindowMonitorOf(3), **every)
    assert steps(found, "train/loss") == steps(found, "lr-SGD") == [3, 6, 9]


class WindowMonitorOf(Callback):
    """Lets the run's monitor log every nth window."""

    def __init__(self, every: int) -> None:
        self.every = every

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        for each in trainer.callbacks:
            if isinstance(each, WindowMonitor):
                each.every_n_steps = self.every


class LogsByHand(Callback):
    """As users do, with whatever step."""

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        trainer.logger.log_metrics({"mine": 1.0}, step=1000)


def test_what_is_logged_by_hand_has_the_step_too(tmp_path: Path) -> None:
    found = rows(tmp_path, OneStep(), LogsByHand(), max_epochs=1)
    assert steps(found, "mine") == steps(found) == [0, 1, 2, 3]  # 0: before a step


class TwoOptimizers(Gan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.log("mine", float(batch_idx))


def test_steps_of_all_optimizers_count(tmp_path: Path) -> None:
    """Windows of two and of three micro-batches; both end with the epoch."""
    logger = MetricsCSVLogger(tmp_path)
    callbacks = [OneStep(), WindowMonitor(1)]
    options: Any = {"max_epochs": 1, "log_every_n_steps": 1}
    fit = trainer(logger=logger, callbacks=callbacks, **options)
    fit.fit(TwoOptimizers(), loader(DATA, 4, collate=pad))
    found = logger.rows()
    assert max(steps(found)) == fit.global_step == 9
    assert steps(found, "window/0/loss") == [1, 3, 4, 6, 8]
    assert steps(found, "window/1/loss") == [2, 5, 7, 9]


class SeveralSteps(Manual):
    """One optimizer that steps twice in a batch."""

    every = 1

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for _ in range(2):
            super().training_step(batch, batch_idx)


def test_no_window_is_lost_where_a_batch_makes_several_steps() -> None:
    record = Record()
    options: Any = {"max_epochs": 1, "log_every_n_steps": 1}
    callbacks = [OneStep(), WindowMonitor(1)]
    trainer(logger=record, callbacks=callbacks, **options).fit(
        SeveralSteps(), loader(DATA, 4)
    )
    assert list(record.of_windows()) == list(range(1, 21))


class Reads(Callback):
    """What callbacks see at the end of each batch."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        found = trainer.callback_metrics
        self.seen.append({k: float(v) for k, v in found.items() if "window" in k})


def test_callbacks_see_the_last_window_that_has_closed(tmp_path: Path) -> None:
    """Also one that is not logged; of the others the last that was."""
    all_rows = [r for r in rows(tmp_path / "a", OneStep()) if "window/loss" in r]
    reads = Reads()
    rows(tmp_path / "b", OneStep(), WindowMonitorOf(50), reads)
    ends = [3, 7, 9, 13, 17, 19]
    for row, batch in zip(all_rows, ends, strict=True):
        seen = reads.seen[batch]
        assert seen["window/loss"] == float(row["window/loss"])
        assert seen["window/weight"] == float(row["window/weight"])
        first = all_rows[0]["window/grad_norm"]
        assert seen["window/grad_norm"] == pytest.approx(float(first))
    assert "window/loss" not in reads.seen[2]  # no window has closed


def test_loggers_get_the_window_once() -> None:
    record = Record()
    callbacks = [AccumulationCallback(PerToken()), WindowMonitor(1)]
    options: Any = {"max_epochs": 1, "log_every_n_steps": 1}
    trainer(4, logger=record, callbacks=callbacks, **options).fit(
        TokenModule(), loader(DATA, 4)
    )
    assert [s for s, row in record.rows if "window/loss" in row] == [0, 1, 2]


def test_logger_is_as_before_after_the_training(tmp_path: Path) -> None:
    logger = MetricsCSVLogger(tmp_path)
    options: Any = {"max_epochs": 1, "log_every_n_steps": 1}
    fit = trainer(4, logger=logger, callbacks=[OneStep()], **options)
    fit.fit(TokenModule(), loader(DATA, 4))
    logger.log_metrics({"a": torch.tensor(1.0)}, step=77)
    assert steps(logger.rows(), "a") == [77]
