"""The processes of agents and trials: their environment, and how they end."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from trainkit.cli.sweep.trial import State, Trial
from trainkit.errors import TrainkitError

KILL_DELAY = "WANDB_AGENT_KILL_DELAY"
"""Seconds between SIGTERM and SIGKILL: a variable of W&B's agent."""

_OF_ANOTHER_RUN = ("WANDB_SERVICE", "WANDB_SWEEP_ID", "WANDB_RUN_ID", "WANDB_RESUME")
_LOCK = "running.lock"
_POLL = 0.05


def environment() -> dict[str, str]:
    """This process's environment, with this Python's `python` and `trainkit` first."""
    env = {k: v for k, v in os.environ.items() if k not in _OF_ANOTHER_RUN}
    here = str(Path(sys.executable).parent)
    env["PATH"] = os.pathsep.join([here, env.get("PATH", os.defpath)])
    return env


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


def exit_status(came: list[int]) -> int:
    """130 after SIGINT, 143 after SIGTERM, 0 without a signal."""
    return 128 + came[0] if came else 0


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
        lock = _take_lock(folder)
        if lock is None:
            raise _is_still_running(trial)
        with lock, (folder / "output.log").open("ab") as output:
            self._process = subprocess.Popen(
                command,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the terminal's Ctrl-C is for the sweep
                pass_fds=[lock.fileno()],
            )
        trial.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code once it has ended; kills it after the time to end is over."""
        code = self._process.poll()
        if code is None and time.monotonic() > self._deadline:
            _kill_all(self._process.pid)
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
    folder = Path(trial.folder)
    if not folder.is_dir() or _becomes_free(folder, 0):
        return False
    if trial.pid is None:  # the sweep was killed before it had saved the number
        raise _is_still_running(trial)
    with suppress(ProcessLookupError):
        os.kill(trial.pid, signal.SIGTERM)
    if not _becomes_free(folder, kill_delay()):
        _kill_all(trial.pid)
        if not _becomes_free(folder, kill_delay()):
            raise _is_still_running(trial)
    return True


def _kill_all(pid: int) -> None:
    """Kill a process and those that it has started."""
    with suppress(ProcessLookupError, PermissionError):  # it has ended
        os.killpg(pid, signal.SIGKILL)


def _is_still_running(trial: Trial) -> TrainkitError:
    return TrainkitError(
        f"trial {trial.name}: a process still runs it in {trial.folder}, and the sweep "
        f"cannot end it. End that process, then resume the sweep."
    )


def _becomes_free(folder: Path, seconds: float) -> bool:
    """Whether nobody has the lock of a folder, at the latest after some time."""
    deadline = time.monotonic() + seconds
    while (lock := _take_lock(folder)) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    lock.close()
    return True


def _take_lock(folder: Path) -> IO[Any] | None:
    file = (folder / _LOCK).open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
