"""What a killed sweep has left running is ended before it resumes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.sweep.helpers import wait_until
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
    wait_until(lambda: "held" in (folder / "output.log").read_text())
    return process


@pytest.mark.parametrize(("words", "status"), [([], -15), (["stubborn"], -9)])
def test_an_orphan_is_asked_and_then_killed(
    words: list[str], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KILL_DELAY, "0.3" if words else "30")
    process = started(tmp_path, *words)
    assert end_orphan(process.trial)
    wait_until(lambda: process.poll() == status)
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
    monkeypatch.setenv(KILL_DELAY, "30")
    process.trial.pid = number
    assert end_orphan(process.trial)
    wait_until(lambda: process.poll() is not None)
