"""A trial's process, which a sweep can stop, and find again after a kill."""

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

    The process holds a lock on its folder as long as it lives, so that a
    resumed sweep sees whether its trials are still running.

    Args:
        trial: which one.
        command: the words to run.
        env: its environment.
        folder: the trial's, which must be there.

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
        """The exit code once it has ended; kills it if it has outstayed its time."""
        code = self._process.poll()
        if code is None and self._deadline and time.monotonic() > self._deadline:
            self.kill()
        return code

    def stop(self) -> None:
        """Ask it to end, as `wandb agent` does; `poll` kills it if it is too slow."""
        if self._deadline is None and self._process.poll() is None:
            self.asked_to_stop = True
            self._deadline = time.monotonic() + kill_delay()
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and what it has started."""
        _kill_group(self._process.pid)
        self._process.wait()


def end_orphan(trial: Trial, folder: Path) -> bool:
    """Stop a trial whose sweep was killed, and which is still running.

    Returns:
        whether it was still running.

    Raises:
        TrainkitError: it runs, and its process id was not saved.
    """
    if not folder.is_dir() or _is_free(folder):
        return False
    if trial.pid is None:
        raise TrainkitError(
            f"trial {trial.name}: a process still runs it in {folder}, started as the "
            f"sweep was killed. End that process, then resume the sweep."
        )
    try:
        os.kill(trial.pid, signal.SIGTERM)
    except ProcessLookupError:
        pass  # one that it has started still holds the lock
    if not _becomes_free(folder):
        _kill_group(trial.pid)
        if not _becomes_free(folder):
            raise TrainkitError(
                f"trial {trial.name}: something that it has started still runs in "
                f"{folder}, and has left its process group. End it, then resume."
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
    """The last line that a trial has written, without W&B's client's output."""
    path = folder / "output.log"
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 8192))
        lines = file.read().decode(errors="replace").splitlines()
    own = own_lines(lines)
    return own[-1].strip() if own else ""


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
