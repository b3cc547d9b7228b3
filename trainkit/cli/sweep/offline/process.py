"""The process of a trial, which a sweep can stop, and find again after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from trainkit.cli.sweep.environment import kill_delay
from trainkit.cli.sweep.trial import Trial, own_lines
from trainkit.errors import TrainkitError

_LOCK = "running.lock"
_POLL = 0.05


class TrialProcess:
    """Runs a trial's command; its output goes to `<folder>/output.log`.

    The process holds a lock on its folder as long as it lives, so that a resumed sweep
    sees whether its trials are still running.

    Args:
        trial: the trial.
        command: the words to run.
        env: its environment.
        folder: the folder of the trial, which must exist.

    Raises:
        OSError: the command cannot be started.
    """

    def __init__(
        self,
        trial: Trial,
        command: Sequence[str],
        env: Mapping[str, str],
        folder: Path,
    ) -> None:
        self.trial = trial
        self.asked_to_stop = False
        self._deadline: float | None = None
        lock = _take_lock(folder)
        if lock is None:
            raise TrainkitError(
                f"trial {trial.name}: another process is running it in {folder}."
            )
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
        if code is None and self._deadline and time.monotonic() > self._deadline:
            self.kill()
        return code

    def stop(self) -> None:
        """Ask it to end with SIGTERM; `poll` kills it if it is too slow."""
        if self._deadline is None and self._process.poll() is None:
            self.asked_to_stop = True
            self._deadline = time.monotonic() + kill_delay()
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it and the processes that it has started."""
        _kill_group(self._process.pid)
        self._process.wait()


def end_orphan(trial: Trial, folder: Path) -> bool:
    """Stop a trial that is still running although its sweep was killed.

    Returns:
        whether it was still running.

    Raises:
        TrainkitError: it is running and cannot be stopped.
    """
    if not folder.is_dir() or _is_free(folder):
        return False
    if trial.pid is None:
        raise TrainkitError(
            f"trial {trial.name}: a process still runs it in {folder}, and the sweep "
            f"was killed before it saved the process id. End that process, then resume "
            f"the sweep."
        )
    try:
        os.kill(trial.pid, signal.SIGTERM)
    except ProcessLookupError:
        pass  # a process that it has started still holds the lock
    if not _becomes_free(folder):
        _kill_group(trial.pid)
        if not _becomes_free(folder):
            raise TrainkitError(
                f"trial {trial.name}: a process that it has started still runs in "
                f"{folder}, and has left its process group. End that process, then "
                f"resume the sweep."
            )
    return True


def _becomes_free(folder: Path) -> bool:
    deadline = time.monotonic() + kill_delay()
    while not _is_free(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    return True


def last_words(folder: Path) -> str:
    """The last line of a trial's output, without the lines of W&B's client."""
    path = folder / "output.log"
    text = path.read_text(errors="replace") if path.is_file() else ""
    return next(reversed(own_lines(text.splitlines())), "").strip()


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
    if lock is None:
        return False
    lock.close()
    return True


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # it has ended
