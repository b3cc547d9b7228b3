"""`step_times.csv`: host time between steps, without validation, and what it costs."""

from __future__ import annotations

import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainkit.cli.report import step_times
from trainkit.cli.report.step_times import StepTimes
from trainkit.cli.report.throughput import read_step_times
from trainkit.cli.runs.folder import RunFolder


class Clock:
    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(step_times, "time", found)
    return found


def trainer(step: int, **options: Any) -> Any:
    known = {"is_global_zero": True, "loggers": [1], "fast_dev_run": False}
    return SimpleNamespace(global_step=step, **{**known, **options})


def stepped(
    times: StepTimes, clock: Clock, *steps: tuple[int, float], **o: Any
) -> None:
    for step, seconds in steps:
        clock.now += seconds
        times.on_train_batch_end(trainer(step, **o), None, None, None, 0)


def test_each_step_has_its_time_without_validation(
    tmp_path: Path, clock: Clock
) -> None:
    times = StepTimes(RunFolder(tmp_path))
    times.on_train_start(trainer(0), None)
    stepped(times, clock, (0, 5), (1, 9), (2, 0.5), (2, 0.25))  # within windows, too
    times.on_validation_start(None, None)
    clock.now += 7
    times.on_validation_end(None, None)
    stepped(times, clock, (3, 0.125))
    times.on_train_end(None, None)
    found = read_step_times(tmp_path / "step_times.csv")
    assert math.isnan(found.pop(1))
    assert found == {2: 0.5, 3: 0.25 + 0.125}


def test_another_process_writes_on(tmp_path: Path, clock: Clock) -> None:
    for first in (0, 2):
        times = StepTimes(RunFolder(tmp_path))
        times.on_train_start(trainer(first), None)
        stepped(times, clock, (first + 1, 1), (first + 2, 1), (first + 3, 1))
        times.on_exception(None, None, None)
    found = read_step_times(tmp_path / "step_times.csv")
    assert [step for step in found if math.isnan(found[step])] == [1, 3]


@pytest.mark.parametrize(
    "options", [{"is_global_zero": False}, {"loggers": []}, {"fast_dev_run": 1}]
)
def test_one_rank_writes_if_there_is_a_logger(
    options: dict[str, Any], tmp_path: Path, clock: Clock
) -> None:
    times = StepTimes(RunFolder(tmp_path))
    times.on_train_start(trainer(0), None)
    stepped(times, clock, (1, 1), (2, 1), **options)
    times.on_train_end(None, None)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_does_not_end_the_training(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    times = StepTimes(RunFolder(tmp_path / "gone"))
    times.on_train_start(trainer(0), None)
    stepped(times, clock, (1, 1), (2, 1))
    assert "trainkit | report: no throughput: " in capsys.readouterr().out


def test_a_step_costs_less_than_a_tenth_of_a_millisecond(tmp_path: Path) -> None:
    times = StepTimes(RunFolder(tmp_path))
    times.on_train_start(trainer(0), None)
    each = [trainer(step) for step in range(2000)]
    began = time.process_time()
    for one in each:
        times.on_train_batch_end(one, None, None, None, 0)
    assert (time.process_time() - began) / 2000 < 1e-4
