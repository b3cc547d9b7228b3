"""What a killed sweep has left running is ended before it resumes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainkit.cli.sweep.process import KILL_DELAY, TrialProcess, end_orphan
from trainkit.cli.sweep.trial import Trial
from trainkit.errors import TrainkitError

HOLDS = """
import signal, sys, time
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("held", flush=True)
time.sleep(600)
"""


def started(folder: Path, *words: str) -> TrialProcess:
    """A process that runs a trial, and is ready."""
    trial = Trial(name="t", arguments={}, folder=str(folder))
    process = TrialProcess(trial, [sys.executable, "-c", HOLDS, *words], {})
    while "held" not in (folder / "output.log").read_text():
        time.sleep(0.02)
    return process


@pytest.mark.parametrize(("words", "status"), [([], -15), (["stubborn"], -9)])
def test_an_orphan_is_asked_and_then_killed(
    words: list[str], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KILL_DELAY, "0.3" if words else "30")
    process = started(tmp_path, *words)
    assert end_orphan(process.trial)
    assert process.poll() == status
    assert not end_orphan(process.trial)  # the controls: nobody holds the lock
    never = Trial(name="t", arguments={}, pid=1, folder=str(tmp_path / "never made"))
    assert not end_orphan(never)


def test_one_that_cannot_be_ended_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KILL_DELAY, "0.1")
    process = started(tmp_path)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait(240)
    number = process.trial.pid
    for process.trial.pid in (ended.pid, None):
        with pytest.raises(TrainkitError, match="t: a process still runs it in"):
            end_orphan(process.trial)
    process.trial.pid = number
    assert end_orphan(process.trial)
