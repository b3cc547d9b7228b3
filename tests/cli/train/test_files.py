"""`metrics.csv` and `train.log`, which each run has in its folder."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from recipes.code_lm import CodeLM
from tests.cli.train.test_mistakes import is_one_message
from tests.cli.training import run_dirs, summary_of, the_run, train
from trainkit.lit.logs.metric_file import Row, read_rows


class Breaks(CodeLM):
    """Has a fault of its own in the second window."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 1:
            raise RuntimeError("my own fault")


@pytest.fixture(autouse=True)
def _without_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")


def log_of(where: Path) -> list[str]:
    return (the_run(where) / "train.log").read_text().splitlines()


def rows_of(where: Path) -> list[Row]:
    return read_rows(the_run(where) / "metrics.csv")


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    found = capsys.readouterr()
    return [*found.out.splitlines(), *found.err.splitlines()]


def test_a_run_that_has_finished_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be trained longer; and begun anew, the control, once it is gone."""
    here = f"paths.run_dir={tmp_path / 'run'}"
    assert train(here) == 0
    last = the_run(tmp_path) / "checkpoints" / "last.ckpt"
    saved = last.read_bytes()
    capsys.readouterr()
    assert train(here, "seed=1") == 2
    assert is_one_message("has a run that has finished", capsys.readouterr().err)
    assert last.read_bytes() == saved
    assert train(here, "ckpt_path=auto", "trainer.max_steps=3") == 0
    assert summary_of(the_run(tmp_path))["steps"] == 3
    shutil.rmtree(tmp_path / "run")
    assert train(here) == 0
    assert summary_of(the_run(tmp_path))["steps"] == 2


def test_a_run_has_all_lines_and_a_row_for_each_step_and_a_resumed_one_appends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("logger=none") == 0
    first = log_of(tmp_path)
    assert sorted(first) == sorted(shown(capsys))
    for text in ("step: per-device", "windows: ", "step 2 of 2: ", "written to: "):
        assert sum(f"trainkit | {text}" in line for line in first) == 1
    where = f"ckpt_path={the_run(tmp_path)}/checkpoints/last.ckpt"
    assert train(where, "trainer.max_steps=3", small=[]) == 0
    whole = log_of(tmp_path)
    assert whole[: len(first)] == first
    assert sorted(whole[len(first) :]) == sorted(shown(capsys))
    assert [row["step"] for row in rows_of(tmp_path)] == ["1", "2", "3"]
    assert train(where, "trainer.max_steps=3", small=[]) == 0  # nothing is left to do
    assert log_of(tmp_path) == whole


def test_a_fault_stands_in_it_and_in_the_summary_and_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = f"model._target_={__name__}.Breaks"
    assert train(broken, "report=true", "pictures=false") == 1
    lines = log_of(tmp_path)
    assert lines[-1] == "RuntimeError: my own fault"
    assert lines[-1] == shown(capsys)[-1]
    assert lines.count("RuntimeError: my own fault") == 1
    run = the_run(tmp_path)
    assert summary_of(run)["status"] == "failed"
    assert "failed after 1 optimizer step" in (run / "report.html").read_text()


def test_a_mistake_that_shows_while_training_stands_in_it(tmp_path: Path) -> None:
    """One before training leaves no log."""
    wrong = "+callbacks.stop={_target_: lightning.pytorch.callbacks.EarlyStopping,"
    assert train(f"{wrong} monitor: nope, check_on_train_epoch_end: false}}") != 0
    assert "nope" in log_of(tmp_path)[-1]
    assert train("model.width=3", "name=other") == 2
    assert len(run_dirs(tmp_path)) == 1
    assert len(list(tmp_path.rglob("train.log"))) == 1


OWN = "logger.csv.filename=mine.csv"
NO_LOGGER = ["logger=none", "+trainer.logger=false", "report=true", "pictures=false"]


@pytest.mark.parametrize("words", [["logger=several", OWN], NO_LOGGER])
def test_each_run_has_one_row_for_each_step(words: list[str], tmp_path: Path) -> None:
    """Also beside a file of one's own, or if the Trainer is told to have no logger."""
    assert train(*words) == 0
    run, found = the_run(tmp_path), rows_of(tmp_path)
    assert [row["step"] for row in found] == ["1", "2"]
    for name in ("window/loss", "window/grad_norm", "lr-AdamW", "epoch", "val/loss"):
        assert all(name in row for row in found)
    assert (run / "report.html").exists() == (words is NO_LOGGER)
    if OWN in words:
        assert read_rows(run / "mine.csv") == found


def test_a_try_of_a_few_batches_has_neither_rows_nor_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lightning's fast_dev_run has no loggers."""
    assert train("trainer.fast_dev_run=true") == 0
    names = {path.name for path in the_run(tmp_path).iterdir()}
    assert not names & {"metrics.csv", "report.html"}
    assert "report" not in capsys.readouterr().out


def test_tensorboard_has_the_same_steps(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert train("logger=tensorboard", "metric=window/loss") == 0
    run = the_run(tmp_path)
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    for name in ("window/loss", "lr-AdamW", "val/loss"):
        assert [each.step for each in events.Scalars(name)] == [1, 2]
    # The window is a metric, of the last one; and best.ckpt goes by it.
    last = rows_of(tmp_path)[-1]
    assert summary_of(run)["metrics"]["window/loss"] == float(last["window/loss"])
    assert (run / "checkpoints" / "best.ckpt").exists()


@pytest.mark.parametrize("name", ["last.ckpt", "best.ckpt"])
def test_a_full_disk_has_one_message_and_leaves_the_checkpoint_before(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control is the run that goes on once there is room."""
    save, saved = Trainer.save_checkpoint, list[bool]()

    def save_until_full(self: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        save(self, path, *args, **kwargs)
        saved.append(Path(path).name.startswith(name))
        if saved.count(True) == 2 and saved[-1]:
            os.truncate(path, 100)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "save_checkpoint", save_until_full)
        assert train("trainer.max_steps=4", "trainer.val_check_interval=4") == 1
    run, shown = the_run(tmp_path), capsys.readouterr().err
    assert is_one_message("No space left on device", shown)
    where = run / "checkpoints" / name if name == "last.ckpt" else run
    assert f"'{where}'" in shown
    assert not (run / "checkpoints" / "last.ckpt.part").exists()
    assert summary_of(run)["status"] == "failed"
    step = torch.load(run / "checkpoints" / "last.ckpt")["global_step"]
    assert 0 < step < 4
    assert train("ckpt_path=last", small=[]) == 0
    assert summary_of(run)["steps"] == 4
