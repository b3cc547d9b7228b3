"""A sweep on a W&B server, whose trials are run by agents of W&B's client."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainkit.cli.sweep.process import (
    environment,
    exit_status,
    kill_delay,
    noted_signals,
)
from trainkit.cli.sweep.sweep_file import SweepFile
from trainkit.cli.sweep.trial import State, Trial
from trainkit.cli.sweep.whole_config import flatten
from trainkit.errors import TrainkitError

_SECONDS = 20
_TICK = 0.1
_PROJECT = "trainkit"
_FINISH_TIMEOUT = "600"
_STATES: dict[str, State] = {
    "pending": "waiting",
    "preempting": "waiting",
    "preempted": "waiting",
    "running": "running",
    "finished": "finished",
    "killed": "stopped",
}
"""The state of a trial by its run's on the server; any other means that it crashed."""


class Server:
    """The server that the client is logged in to, for one sweep file.

    Raises:
        TrainkitError: there is no server, or nobody is logged in.
    """

    def __init__(self, sweep: SweepFile) -> None:
        import wandb

        self._sweep = sweep
        with _as_our_error():
            self._api = wandb.Api(timeout=_SECONDS)
            entity = os.environ.get("WANDB_ENTITY") or sweep.entity
            self._entity = str(entity or self._api.default_entity)
        project = os.environ.get("WANDB_PROJECT") or sweep.project
        self._project = str(project or _PROJECT)

    def open(self, sweep_id: str | None) -> str:
        """Create the sweep, or find the one that is resumed; returns its id."""
        import wandb

        # The client prints; standard output is for the table.
        with _as_our_error(), contextlib.redirect_stdout(sys.stderr):
            if sweep_id is not None:
                return self._api.sweep(self.path(sweep_id)).id
            return wandb.sweep(self._sweep.config, self._entity, self._project)

    def path(self, name: str) -> str:
        """The path of a sweep or run of the project."""
        return f"{self._entity}/{self._project}/{name}"

    def trials(self, sweep_id: str) -> list[Trial]:
        """The sweep's runs, in the state that the server knows now."""
        with _as_our_error():
            return [
                self._trial(run) for run in self._api.sweep(self.path(sweep_id)).runs
            ]

    def _trial(self, run: Any) -> Trial:
        summary = {name: _value(entry) for name, entry in dict(run.summary).items()}
        config = {**flatten(run.config), **run.config}  # nested or not, by dotted name
        arguments = {k: config[k] for k in self._sweep.varied if k in config}
        state = _STATES.get(run.state, "crashed")
        trial = Trial(name=run.id, arguments=arguments, state=state)
        trial.read([summary], self._sweep.metric_name)
        trial.num_rows = int(summary.get("_step", -1)) + 1
        return trial

    def run_agents(
        self, sweep_id: str, folder: Path, *, number: int, count: int | None
    ) -> int:
        """Run agents until they leave; their output goes to our errors.

        SIGINT and SIGTERM reach each agent as SIGTERM, which it passes on to its trial.
        The trial may save a checkpoint. If it takes too long, the agent kills it.

        Returns:
            0, or 130 or 143 if a signal ended it.
        """
        env = environment() | {
            "WANDB_DIR": str(folder),
            "WANDB_ENTITY": self._entity,
            "WANDB_PROJECT": self._project,
        }
        # A trial must not wait forever for a server that has died.
        env.setdefault("WANDB_FINISH_TIMEOUT", _FINISH_TIMEOUT)
        agent = [sys.executable, "-m", "wandb", "agent", "--forward-signals"]
        agent += ["--term-timeout", str(round(kill_delay()))]
        with noted_signals() as came:
            agents = [
                subprocess.Popen(
                    [*agent, *share, self.path(sweep_id)],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=sys.stderr,
                    start_new_session=True,  # the terminal's Ctrl-C is for the sweep
                )
                for share in _shares(count, number)
            ]
            passed_on = 0
            while any(each.poll() is None for each in agents):
                if len(came) > passed_on:
                    passed_on = len(came)
                    for each in agents:
                        each.terminate()
                time.sleep(_TICK)
        return exit_status(came)


def _value(entry: Any) -> Any:
    """The value in a summary's entry, which `define_metric(summary=...)` nests."""
    if hasattr(entry, "items"):
        return next((each for _, each in entry.items()), None)
    return entry


@contextlib.contextmanager
def _as_our_error() -> Iterator[None]:
    import wandb

    try:
        yield
    except (wandb.Error, ValueError, OSError) as error:
        raise TrainkitError(
            f"trainkit sweep: W&B reports: {error} Check `wandb login` and the "
            f"network, or run this file without a server: --offline."
        ) from error


def _shares(count: int | None, number: int) -> list[list[str]]:
    """The option of each agent that says how many trials it may start.

    >>> _shares(5, 2), _shares(1, 3), _shares(None, 2)
    ([['--count', '3'], ['--count', '2']], [['--count', '1']], [[], []])
    """
    if count is None:
        return [[]] * number
    shares = [len(range(first, count, number)) for first in range(number)]
    return [["--count", str(share)] for share in shares if share]
