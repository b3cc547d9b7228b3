"""`metrics.csv` is in the folder of each run, whatever the logger is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.training import summary_of, the_run, train
from trainkit.lit.logs.metric_file import Row, read_rows


@pytest.fixture(autouse=True)
def _without_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")


def rows_of(where: Path) -> list[Row]:
    return read_rows(the_run(where) / "metrics.csv")


@pytest.mark.parametrize(
    "logger", ["csv", "none", "tensorboard", "wandb", "several", "none trainer"]
)
def test_each_run_has_one_row_for_each_step(logger: str, tmp_path: Path) -> None:
    """Also if the Trainer is told to have no logger."""
    group, *more = logger.split()
    words = ["+trainer.logger=false"] if more else []
    assert train(f"logger={group}", *words) == 0
    found = rows_of(tmp_path)
    assert [row["step"] for row in found] == ["1", "2"]
    for name in ("window/loss", "window/grad_norm", "lr-AdamW", "epoch"):
        assert all(name in row for row in found)
    assert ["val/loss" in row for row in found] == [True, True]
    assert (the_run(tmp_path) / "report.html").exists()


def test_a_file_of_ones_own_is_beside_it(tmp_path: Path) -> None:
    assert train("logger.csv.filename=mine.csv", "trainer.max_steps=1") == 0
    run = the_run(tmp_path)
    mine = read_rows(run / "mine.csv")
    assert mine == read_rows(run / "metrics.csv") != []


def test_a_try_of_a_few_batches_writes_none(tmp_path: Path) -> None:
    """Lightning's fast_dev_run has no loggers."""
    assert train("trainer.fast_dev_run=true") == 0
    assert not (the_run(tmp_path) / "metrics.csv").exists()


def test_tensorboard_has_the_same_steps(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert train("logger=tensorboard") == 0
    events = EventAccumulator(str(the_run(tmp_path) / "tensorboard"))
    events.Reload()
    for name in ("window/loss", "lr-AdamW", "val/loss"):
        assert [each.step for each in events.Scalars(name)] == [1, 2]


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    assert train("logger=none", "trainer.max_steps=2") == 0
    run = the_run(tmp_path)
    assert train(f"ckpt_path={run}/checkpoints/last.ckpt", "trainer.max_steps=4") == 0
    assert [row["step"] for row in rows_of(tmp_path)] == ["1", "2", "3", "4"]


def test_the_window_is_a_metric(tmp_path: Path) -> None:
    """Of the last window, also if that one is not logged; and best.ckpt by it."""
    assert train("metric=window/loss", "trainer.log_every_n_steps=1") == 0
    run = the_run(tmp_path)
    last = rows_of(tmp_path)[-1]
    assert summary_of(run)["metrics"]["window/loss"] == float(last["window/loss"])
    assert (run / "checkpoints" / "best.ckpt").exists()
