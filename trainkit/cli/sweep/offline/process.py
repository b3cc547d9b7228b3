"""The process of a trial, which a sweep can stop, and find again after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from trainkit.cli.sweep.environment import kill_delay
from trainkit.cli.sweep.trial import Trial
from trainkit.errors import TrainkitError

_LOCK = "running.lock"
_POLL = 0.05


class TrialProcess:
    """Runs a trial's command; its output goes to `<folder>/output.log`.

    The process and those that it starts inherit a lock on its folder. So a resumed
    sweep sees whether its trials are still running.

    Args:
        trial: the trial; its folder must exist.
        command: the words to run.
        env: its environment.

    Raises:
        OSError: the command cannot be started.
    """

    def __init__(
        self, trial: Trial, command: Sequence[str], env: Mapping[str, str]
    ) -> None:
        self.trial = trial
        self.asked_to_stop = False
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
            self.kill()
        return code

    def stop(self) -> None:
        """Ask it to end with SIGTERM; `poll` kills it if it is too slow."""
        if not self.asked_to_stop and self._process.poll() is None:
            self.asked_to_stop = True
            self._deadline = time.monotonic() + kill_delay()
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it and the processes that it has started."""
        _signal_group(self._process.pid, signal.SIGKILL)
        self._process.wait()


def end_orphan(trial: Trial) -> bool:
    """Stop a trial that is still running although its sweep was killed.

    Returns:
        whether it was still running.

    Raises:
        TrainkitError: it is running and cannot be stopped.
    """
    folder = Path(trial.folder)
    if not folder.is_dir() or _is_free(folder):
        return False
    if trial.pid is None:  # the sweep was killed before it had saved the number
        raise _is_still_running(trial)
    with suppress(ProcessLookupError):  # what it has started may still hold the lock
        os.kill(trial.pid, signal.SIGTERM)
    if not _becomes_free(folder):
        _signal_group(trial.pid, signal.SIGKILL)
        if not _becomes_free(folder):
            raise _is_still_running(trial)
    return True


def _is_still_running(trial: Trial) -> TrainkitError:
    return TrainkitError(
        f"trial {trial.name}: a process still runs it in {trial.folder}, and the sweep "
        f"cannot end it. End that process, then resume the sweep."
    )


def _becomes_free(folder: Path) -> bool:
    deadline = time.monotonic() + kill_delay()
    while not _is_free(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    return True


def _take_lock(folder: Path) -> IO[Any] | None:
    import fcntl

    file = (folder / _LOCK).open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def _is_free(folder: Path) -> bool:
    lock = _take_lock(folder)
    if lock is not None:
        lock.close()
    return lock is not None


def _signal_group(pid: int, signum: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # it has ended
        os.killpg(pid, signum)
