"""A signal is heard by the process that listens, and ends those that it has forked."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, time
from trainkit.lit.resume.graceful_stop import FirstSignal
signals = FirstSignal("the rest follows", on_ctrl_c="Ctrl+C again quits")
signals.listen()
ready, wrote = os.pipe()
child = os.fork()
if not child:
    while True:
        os.write(wrote, b"!")
        time.sleep(0.001)
os.close(wrote)
os.read(ready, 1)
os.kill(child, signal.SIGINT)
print(all(os.read(ready, 1) for _ in range(100)))
os.kill(child, signal.SIGTERM)
status = os.waitpid(child, 0)[1]
print(os.WTERMSIG(status) == signal.SIGTERM, signals.heard)
signal.raise_signal(signal.SIGINT)
print(signals.heard == signal.SIGINT)
signal.raise_signal(signal.SIGTERM)
print(signals.heard == signal.SIGINT)
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""


SWALLOWED = """
import signal
from trainkit.cli.ctrl_c import remember_ctrl_c
from trainkit.lit.resume.graceful_stop import FirstSignal
if {remembers}:
    remember_ctrl_c()
class Collected:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
Collected()
signals = FirstSignal("the rest follows", on_ctrl_c="Ctrl+C again quits")
signals.listen()
print(signals.heard)
"""


@pytest.mark.parametrize(("remembers", "heard"), [(True, 2), (False, 0)])
def test_a_ctrl_c_that_a_finalizer_swallowed_is_heard(
    remembers: bool, heard: int
) -> None:
    program = [sys.executable, "-c", SWALLOWED.format(remembers=remembers)]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert int(done.stdout) == heard
    assert "Exception ignored" in done.stderr


def test_a_worker_outlives_ctrl_c_only_and_its_parent_notes_the_first() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.split() == ["True", "True", "0", "True", "True", "interrupted"]
    assert done.stderr == (
        "\ntrainkit | SIGINT: the rest follows; Ctrl+C again quits\n"
    )
