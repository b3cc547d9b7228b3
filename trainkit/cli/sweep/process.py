"""The processes of agents and trials: their environment, and how they end."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

KILL_DELAY = float(os.environ.get("WANDB_AGENT_KILL_DELAY", 30))
"""Seconds between SIGTERM and SIGKILL: a variable of W&B's agent, and its default."""

_OF_ANOTHER_RUN = ("WANDB_SERVICE", "WANDB_SWEEP_ID", "WANDB_RUN_ID", "WANDB_RESUME")
_LOCK = "running.lock"


def environment() -> dict[str, str]:
    """This process's environment, with this Python's `python` and `trainkit` first."""
    env = {k: v for k, v in os.environ.items() if k not in _OF_ANOTHER_RUN}
    here = str(Path(sys.executable).parent)
    return env | {"PATH": os.pathsep.join([here, env.get("PATH", os.defpath)])}


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM inside a `with` block, as a list that a loop can check."""
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def started(
    command: Sequence[str], env: Mapping[str, str], folder: Path
) -> subprocess.Popen[bytes]:
    """The process of a trial, whose output goes to `<folder>/output.log`.

    It and those that it starts inherit a lock on the folder, which exists. So a resumed
    sweep sees whether its trials are still running.
    """
    with (
        (folder / _LOCK).open("a") as lock,
        (folder / "output.log").open("ab") as log,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the terminal's Ctrl-C is for the sweep
            pass_fds=[lock.fileno()],
        )


def wait_for_orphan(folder: Path, say: Callable[[str], None]) -> None:
    """Wait until nothing runs any more in a trial's folder, as it does after a kill."""
    if not (folder / _LOCK).exists():
        return
    with (folder / _LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"a trial of the killed sweep still runs in {folder}; it may end first")
            fcntl.flock(lock, fcntl.LOCK_EX)
