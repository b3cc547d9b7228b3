"""What a killed sweep has left running is ended before it resumes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trainkit.cli.sweep.process import KILL_DELAY, end_orphan
from trainkit.cli.sweep.trial import Trial
from trainkit.errors import TrainkitError

HOLDS = """
import fcntl, signal, sys, time
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


@contextmanager
def holder(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock of a trial, in a group of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(folder / "running.lock"), *words],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait(240)
        assert process.stdout is not None
        process.stdout.close()


def trial(pid: int | None, folder: Path) -> Trial:
    return Trial(name="t", arguments={}, pid=pid, folder=str(folder))


@pytest.mark.parametrize(("words", "status"), [([], -15), (["stubborn"], -9)])
def test_an_orphan_is_asked_and_then_killed(
    words: list[str], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KILL_DELAY, "0.3" if words else "30")
    assert not end_orphan(trial(1, tmp_path))  # the controls: nobody holds the lock
    assert not end_orphan(trial(1, tmp_path / "never made"))
    with holder(tmp_path, *words) as process:
        assert end_orphan(trial(process.pid, tmp_path))
        assert process.wait(240) == status


def test_one_that_cannot_be_ended_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KILL_DELAY, "0.1")
    with holder(tmp_path):
        with subprocess.Popen([sys.executable, "-c", ""]) as ended:
            ended.wait(240)
        for number in (ended.pid, None):
            with pytest.raises(TrainkitError, match="t: a process still runs it in"):
                end_orphan(trial(number, tmp_path))
