"""`trainkit train test=true` tests the best weights when training has ended."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import ones_own
from tests.cli.test_evaluate import EPOCHS, OWN, result, trained, trainkit
from tests.cli.training import run_dirs, summary_of, the_run
from tests.cli.wandb_runs import folders, records
from tests.startup import forked
from trainkit.cli.comparison import table
from trainkit.cli.runs.folder import RunFolder


def test_it_is_the_test_that_the_command_makes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["metric=test/loss", "callbacks.best.monitor=val/loss"]
    run = trained(tmp_path, "test=true", *words)
    said = capsys.readouterr().out
    at_end = summary_of(run)["test"]
    assert at_end == result(run, "test")
    assert at_end["checkpoint"] == "checkpoints/best.ckpt"
    assert at_end["step"] < summary_of(run)["steps"] == 20
    assert f"test/loss: {at_end['metrics']['test/loss']:.4g}" in said
    assert "val/loss" in summary_of(run)["metrics"]
    with (run / "metrics.csv").open() as file:
        logged = [float(r["test/loss"]) for r in csv.DictReader(file) if r["test/loss"]]
    assert logged == [at_end["metrics"]["test/loss"]]
    header, row = table([RunFolder(run)])  # by which runs are compared
    assert header.split()[-1] == "test/loss"
    assert float(row.split()[-1]) == pytest.approx(logged[0], rel=1e-5)
    assert trainkit("test", run) == 0
    assert result(run, "test")["metrics"] == at_end["metrics"]
    assert trainkit("test", run / "checkpoints" / "last.ckpt") == 0
    assert result(run, "test")["metrics"] != at_end["metrics"]  # the control
    capsys.readouterr()
    assert trainkit("train", f"ckpt_path={run}/checkpoints/last.ckpt") == 0
    assert "| test" not in capsys.readouterr().out  # nothing was left to train


@pytest.mark.parametrize(
    ("words", "options", "text"),
    [
        ([], {"model": "Bare"}, "model: must have test_step to test, and Bare has"),
        ([], {"data": "BareData"}, "data: BareData has no test_dataloader"),
        (["trainer.enable_checkpointing=false"], {}, "test: needs a checkpoint"),
    ],
)
def test_what_cannot_be_tested_is_refused_before_training(
    words: list[str],
    options: dict[str, str],
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ValueError, match="not enough values"):  # no run has begun
        trained(tmp_path, "test=true", *words, status=2, **options)
    shown = capsys.readouterr().err
    assert text in shown
    assert shown.count("trainkit: ") == 1
    assert not run_dirs(tmp_path)


def test_one_that_fails_leaves_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path, "test=true", model="Failing", status=1)
    assert "ZeroDivisionError: in test_step" in capsys.readouterr().err
    summary = summary_of(run)
    assert (summary["status"], summary["test"]) == ("finished", None)


def test_a_signal_ends_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    number = signal.SIGTERM

    def stop(*args: object) -> None:
        os.kill(os.getpid(), number)

    monkeypatch.setattr(ones_own.Net, "test_step", stop)
    run = trained(tmp_path, "test=true", status=128 + number)
    summary = summary_of(run)
    assert (summary["status"], summary["test"]) == ("finished", None)
    capsys.readouterr()
    assert trainkit("test", run) == 128 + number
    assert "stopped by SIGTERM" in capsys.readouterr().out
    assert not (run / "test.json").exists()


def test_an_interrupted_training_is_not_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(ones_own.Net, "on_train_epoch_start", stop, raising=False)
    run = trained(tmp_path, "test=true", status=143)
    summary = summary_of(run)
    assert (summary["status"], summary["test"]) == ("interrupted", None)
    assert not (run / "test.json").exists()


def test_it_is_in_the_one_run_of_wandb(private_wandb: Path) -> None:
    """Which ends with the test."""
    run = trained(private_wandb, "test=true", "logger=wandb")
    (folder,) = folders(run)
    shown = str(records(folder))
    assert "val/loss" in shown
    assert "test/loss" in shown
    assert "'type': 'exit'" in shown


TWO_RANKS = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]


@pytest.mark.slow
def test_each_row_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nine rows to test are ten on two ranks, and nine on one device."""
    own = [f"model._target_={OWN}.Net", f"data._target_={OWN}.Data", "test=true"]
    done = subprocess.run(
        [sys.executable, "-m", "trainkit", "train", *own, *EPOCHS, *TWO_RANKS],
        cwd=tmp_path,
        env=dict(os.environ, TRAINKIT_ALLOW="tests", **forked()),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "; on 2 ranks some rows may count twice" in done.stdout
    run = the_run(tmp_path)
    at_end = summary_of(run)["test"]
    assert at_end == result(run, "test")
    assert trainkit("test", run) == 0
    assert "the run had trainer.devices=2" in capsys.readouterr().out
    once = result(run, "test")
    assert once["step"] == at_end["step"]
    assert once["metrics"] != at_end["metrics"]  # of nine rows, one counted twice
    assert trainkit("test", run, "trainer=cpu") == 0
    assert result(run, "test")["metrics"] == once["metrics"]
