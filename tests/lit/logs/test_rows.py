"""The steps of rows: Lightning's own, or one row for each optimizer step, from 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback, LearningRateMonitor

from tests.helpers import TokenModule, loader, ragged_sequences, trainer
from tests.lit.logs.test_monitor import NeverThere
from tests.zoo.callbacks import Table
from tests.zoo.modules import Gan, Manual, hooked
from trainkit import (
    AccumulationCallback,
    LearningRates,
    MetricsCSVLogger,
    OneStep,
    PerToken,
    WindowMonitor,
)
from trainkit.lit.logs import monitor
from trainkit.lit.logs.metrics_csv import Row

DATA = ragged_sequences(38)  # ten batches of four: windows of 4, 4 and 2
pytestmark = pytest.mark.filterwarnings("ignore:.*no learning rate schedulers")


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
    how: dict[str, Any] = {"log_every_n_steps": 1, "max_epochs": 2, **options}
    fit = trainer(how.pop("accumulate", 4), logger=logger, callbacks=callbacks, **how)
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


@pytest.mark.parametrize(
    ("kind", "logged"),
    [(LearningRates, [0, 1, 2]), (LearningRateMonitor, [0] * 4 + [1] * 4 + [2] * 2)],
)
def test_rates_are_logged_once_a_step(kind: Any, logged: list[int]) -> None:
    """The control is Lightning's own, which logs them before each micro-batch."""
    table, ours = Table(), AccumulationCallback(PerToken())
    how: dict[str, Any] = {"logger": table, "log_every_n_steps": 1, "max_epochs": 1}
    fit = trainer(4, callbacks=[kind(logging_interval="step"), ours], **how)
    fit.fit(TokenModule(), loader(DATA, 4))
    assert [row["step"] for row in table.rows if "lr-SGD" in row] == logged


def test_each_nth_window_is_logged_once_with_what_the_module_logs(
    tmp_path: Path,
) -> None:
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
    how: dict[str, Any] = {"max_epochs": 1, "log_every_n_steps": 1}
    fit = trainer(4, logger=logger, callbacks=[OneStep()], **how)
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
