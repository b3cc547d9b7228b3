"""The processes of agents and trials: their environment, and how they end."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from trainkit.cli.sweep.trial import State, Trial
from trainkit.errors import TrainkitError

KILL_DELAY = "WANDB_AGENT_KILL_DELAY"
"""Seconds between SIGTERM and SIGKILL: a variable of W&B's agent."""

_OF_ANOTHER_RUN = ("WANDB_SERVICE", "WANDB_SWEEP_ID", "WANDB_RUN_ID", "WANDB_RESUME")
_LOCK = "running.lock"


def environment() -> dict[str, str]:
    """This process's environment, with this Python's `python` and `trainkit` first."""
    env = {k: v for k, v in os.environ.items() if k not in _OF_ANOTHER_RUN}
    here = str(Path(sys.executable).parent)
    return env | {"PATH": os.pathsep.join([here, env.get("PATH", os.defpath)])}


def kill_delay() -> float:
    return float(os.environ.get(KILL_DELAY, 30))  # the agent's own default


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


class TrialProcess:
    """Runs a trial's command; its output goes to `<folder>/output.log`.

    The process and those that it starts inherit a lock on its folder, which exists. So
    a resumed sweep sees whether its trials are still running.

    Attributes:
        trial: the trial.
        becomes: the trial's state if it ends because it was asked to.
    """

    def __init__(
        self, trial: Trial, command: Sequence[str], env: Mapping[str, str]
    ) -> None:
        self.trial = trial
        self.becomes: State | None = None
        self._deadline = float("inf")
        folder = Path(trial.folder)
        with (
            (folder / _LOCK).open("a") as lock,
            (folder / "output.log").open("ab") as log,
        ):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._process = subprocess.Popen(
                command,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the terminal's Ctrl-C is for the sweep
                pass_fds=[lock.fileno()],
            )
        trial.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code once it has ended; kills it after the time to end is over."""
        code = self._process.poll()
        if code is None and time.monotonic() > self._deadline:
            _send(os.killpg, self._process.pid, signal.SIGKILL)
            return self._process.wait()
        return code

    def stop(self, becomes: State, *, at_once: bool = False) -> None:
        """Ask it to end with SIGTERM; `poll` kills it if it is too slow."""
        if self.becomes is None and self._process.poll() is None:
            self.becomes = becomes
            self._deadline = time.monotonic() + kill_delay()
            self._process.terminate()
        if at_once:
            self._deadline = 0.0


def end_orphan(trial: Trial) -> bool:
    """Stop a trial that is still running although its sweep was killed.

    Returns:
        whether it was still running.

    Raises:
        TrainkitError: it is running and cannot be stopped.
    """
    if not Path(trial.folder).is_dir() or _becomes_free(trial, 0):
        return False
    if trial.pid is not None:  # the sweep was not killed before it had saved it
        for send, number in ((os.kill, signal.SIGTERM), (os.killpg, signal.SIGKILL)):
            _send(send, trial.pid, number)
            if _becomes_free(trial, kill_delay()):
                return True
    raise TrainkitError(
        f"trial {trial.name}: a process still runs it in {trial.folder}, and the sweep "
        f"cannot end it. End that process, then resume the sweep."
    )


def _send(how: Callable[[int, int], None], pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # it has ended
        how(pid, number)


def _becomes_free(trial: Trial, seconds: float) -> bool:
    """Whether the lock of a trial's folder is free within some time."""
    try:
        with FileLock(Path(trial.folder, _LOCK)).acquire(timeout=seconds):
            return True
    except Timeout:
        return False
