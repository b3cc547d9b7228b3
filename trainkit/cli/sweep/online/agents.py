"""Processes of `wandb agent`, which end so that their trials can save."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from trainkit.cli.sweep.environment import kill_delay

_PAUSE = 0.5
"""Seconds between two signals, so that the agent sees both."""


class Agents:
    """Runs agents of W&B's client on one sweep.

    Args:
        sweep: its path, `entity/project/id`.
        number: how many agents.
        count: how many trials all agents together may start; None for any number.
        env: their environment.
        folder: the folder for their logs.
    """

    def __init__(
        self,
        sweep: str,
        *,
        number: int,
        count: int | None,
        env: Mapping[str, str],
        folder: Path,
    ) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        for index, share in enumerate(shares(count, number)):
            command = [sys.executable, "-m", "wandb", "agent"]
            if share is not None:
                command += ["--count", str(share)]
            with (folder / f"agent-{index}.log").open("ab") as output:
                process = subprocess.Popen(
                    [*command, sweep],
                    env=dict(env),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # the terminal's Ctrl-C is for the sweep
                )
            self._processes.append(process)

    def are_running(self) -> bool:
        return self.num_running() > 0

    def num_running(self) -> int:
        return sum(process.poll() is None for process in self._processes)

    def start_no_more(self) -> None:
        """Let the agents leave when the running trials have ended."""
        self._signal()

    def stop(self) -> None:
        """End the trials with SIGTERM, then the agents; kill what takes too long."""
        # At the first SIGINT an agent waits for its trials, at the second it sends
        # them SIGTERM, and at the third SIGKILL.
        self._signal()
        time.sleep(_PAUSE)
        self._signal()
        if not self.wait(kill_delay()):
            self.kill()

    def kill(self) -> None:
        """End the trials and the agents at once."""
        for _ in range(3):
            self._signal()
            time.sleep(_PAUSE)
        self._await_or_kill()

    def end(self) -> None:
        """End the agents, which start nothing from then on, and leave their trials."""
        for process in self._processes:
            process.terminate()  # an agent does not handle SIGTERM, nor pass it on
        self._await_or_kill()

    def wait(self, seconds: float) -> bool:
        """Wait for the agents to leave, and return whether all have left in time."""
        deadline = time.monotonic() + seconds
        while self.are_running() and time.monotonic() < deadline:
            time.sleep(0.1)
        return not self.are_running()

    def _await_or_kill(self) -> None:
        if not self.wait(15):
            for process in self._processes:
                process.kill()
                process.wait()

    def _signal(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)


def shares(count: int | None, number: int) -> list[int | None]:
    """How many trials each agent may start.

    >>> shares(5, 2), shares(1, 3), shares(None, 2)
    ([3, 2], [1], [None, None])
    """
    if count is None:
        return [None] * number
    each, left = divmod(count, number)
    return [each + (index < left) for index in range(number) if each + (index < left)]
