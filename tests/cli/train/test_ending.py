"""A signal that reaches a run which is over does not make it an interrupted one."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.train.test_interrupted import run_apart
from tests.cli.training import (
    SMALL,
    run_dirs,
    same_weights,
    summary_of,
    the_run,
    train,
    weights_of,
)
from trainkit.cli.report import write
from trainkit.config import allow_targets
from trainkit.lit.logs.metrics_csv import MetricsCSVLogger

allow_targets("tests")

LAST = 7
"""The last batch of the two steps; a validation follows it."""


@pytest.fixture(autouse=True)
def died(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[int]]:
    """What reached the handlers of before the run: what would end a process."""
    found: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {
        each: signal.signal(each, lambda number, _: found.append(number))
        for each in numbers
    }
    ours = [signal.getsignal(each) for each in numbers]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["trainkit"])
    yield found
    assert [signal.getsignal(each) for each in numbers] == ours  # given back
    for each, handler in before.items():
        signal.signal(each, handler)


def killer(hook: str, batch: int, signum: str = "SIGTERM") -> str:
    return (
        "+callbacks.killer={_target_: tests.cli.train.killer.Killer, "
        f"hook: {hook}, batch: {batch}, signum: {signum}}}"
    )


class LateLogger(MetricsCSVLogger):
    """Gets the signals while it is closed, as a tracker that uploads."""

    signals: tuple[signal.Signals, ...] = (signal.SIGTERM,)

    def finalize(self, status: str) -> None:
        for number in self.signals:
            signal.raise_signal(number)
        super().finalize(status)


LATE = "logger.csv._target_=tests.cli.train.test_ending.LateLogger"


@pytest.mark.parametrize(
    ("hook", "signum"),
    [
        ("on_train_batch_end", "SIGTERM"),
        ("on_validation_end", "SIGINT"),
        ("on_train_end", "SIGTERM"),
        ("on_fit_end", "SIGINT"),
    ],
)
def test_a_stop_after_the_last_step_finds_a_finished_run(
    hook: str, signum: str, died: list[int], tmp_path: Path
) -> None:
    assert train(killer(hook, LAST, signum)) == 0
    assert died == []
    found = summary_of(the_run(tmp_path))
    assert (found["status"], found["steps"]) == ("finished", 2)
    assert (the_run(tmp_path) / "checkpoints" / "last.ckpt").exists()


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end"])
def test_a_stop_before_the_last_step_finds_an_interrupted_run(
    hook: str, died: list[int], tmp_path: Path
) -> None:
    """The control."""
    with pytest.raises(SystemExit) as end:
        train(killer(hook, 3))
    assert end.value.code == 143
    found = summary_of(the_run(tmp_path))
    assert (found["status"], found["steps"]) == ("interrupted", 1)


def test_an_epoch_of_one_batch_is_the_last_one_as_well(
    died: list[int], tmp_path: Path
) -> None:
    epochs = ["trainer.max_steps=-1", "trainer.max_epochs=2", "scheduler=none"]
    small = ["trainer.limit_train_batches=1", "trainer.val_check_interval=1"]
    small.append("trainer.accumulate_grad_batches=1")
    assert train(killer("on_train_batch_end", 1), *epochs, *small) == 0
    assert summary_of(the_run(tmp_path))["status"] == "finished"
    with pytest.raises(SystemExit):  # the control
        train(killer("on_train_batch_end", 0), *epochs, *small)
    statuses = {summary_of(each)["status"] for each in run_dirs(tmp_path)}
    assert statuses == {"finished", "interrupted"}


def test_a_stop_while_loggers_are_closed_finds_a_finished_run(
    died: list[int], tmp_path: Path, capfd: Any
) -> None:
    """A sweep's server stops a poor trial when its rows arrive, at its end."""
    assert train(LATE) == 0
    assert died == []
    assert summary_of(the_run(tmp_path))["status"] == "finished"
    assert "SIGTERM: training is over" in capfd.readouterr().err


def test_a_stop_while_the_report_is_drawn(
    died: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*args: Any, **kwargs: Any) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("trainkit.cli.train.job.report_of_training", stopped)
    assert train() == 0
    assert died == []
    assert write.write_report is not stopped
    assert summary_of(the_run(tmp_path))["status"] == "finished"


def test_a_second_stop_does_not_hide_how_an_interrupted_run_ended(
    died: list[int], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as end:
        train(LATE, killer("on_train_batch_end", 3))
    assert end.value.code == 143
    assert died == []
    assert summary_of(the_run(tmp_path))["status"] == "interrupted"


def test_ctrl_c_twice_leaves_at_once_and_the_run_is_finished(
    died: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LateLogger, "signals", (signal.SIGINT, signal.SIGINT))
    with pytest.raises(SystemExit) as end:
        train(LATE)
    assert end.value.code == 130
    assert died == []
    assert summary_of(the_run(tmp_path))["status"] == "finished"


@pytest.mark.parametrize("where", [killer("on_train_batch_end", LAST), LATE])
def test_the_other_runs_of_a_multirun_are_not_begun(
    where: str, died: list[int], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as end:
        train("-m", "seed=1,2", where)
    assert end.value.code == 143
    (run,) = run_dirs(tmp_path)
    assert summary_of(run)["status"] == "finished"


@pytest.mark.slow
def test_a_process_that_is_stopped_at_its_end_tells_it(tmp_path: Path) -> None:
    """Without handlers of anybody's."""
    plain, stopped = tmp_path / "plain", tmp_path / "stopped"
    for folder, words in ((plain, []), (stopped, [LATE])):
        folder.mkdir()
        ended = run_apart(folder, *SMALL, *words)
        assert ended.returncode == 0, ended.stderr
        assert summary_of(the_run(folder))["status"] == "finished"
    assert same_weights(weights_of(the_run(stopped)), weights_of(the_run(plain)))
    assert os.listdir(the_run(stopped)) == os.listdir(the_run(plain))
