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

from trainkit.cli.sweep.process import environment, kill_delay, noted_signals
from trainkit.cli.sweep.sweep_file import SweepFile
from trainkit.cli.sweep.trial import State, Trial
from trainkit.cli.sweep.whole_config import flatten
from trainkit.errors import TrainkitError

_SECONDS = 20
_TICK = 0.1
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


class OnlineSweep:
    """A sweep on the server that the client is logged in to.

    Args:
        sweep: the file.
        sweep_id: of a sweep that is resumed; None creates one.

    Attributes:
        id: the sweep's.
        path: the sweep's on the server.

    Raises:
        TrainkitError: there is no server, or nobody is logged in.
    """

    def __init__(self, sweep: SweepFile, sweep_id: str | None) -> None:
        import wandb

        self._sweep = sweep
        # The client prints; standard output is for the table.
        with _as_our_error(), contextlib.redirect_stdout(sys.stderr):
            self._api = wandb.Api(timeout=_SECONDS)
            entity = os.environ.get("WANDB_ENTITY") or sweep.entity
            self._entity = str(entity or self._api.default_entity)
            project = os.environ.get("WANDB_PROJECT") or sweep.project
            self._project = str(project or "trainkit")
            where = f"{self._entity}/{self._project}"
            if sweep_id is None:
                self.id = wandb.sweep(sweep.config, self._entity, self._project)
            else:
                self.id = self._api.sweep(f"{where}/{sweep_id}").id
            self.path = f"{where}/{self.id}"

    def trials(self) -> list[Trial]:
        """The sweep's runs, in the state that the server knows now."""
        with _as_our_error(f"--resume {self.id} shows the trials once it answers."):
            return [self._trial(run) for run in self._api.sweep(self.path).runs]

    def _trial(self, run: Any) -> Trial:
        summary = dict(run.summary)
        for name, entry in summary.items():
            if hasattr(entry, "items"):  # by `define_metric(summary=...)`
                summary[name] = next(iter(dict(entry).values()), None)
        config = {**flatten(run.config), **run.config}  # nested or not, by dotted name
        arguments = {k: config[k] for k in self._sweep.varied if k in config}
        state = _STATES.get(run.state, "crashed")
        trial = Trial(name=run.id, arguments=arguments, state=state)
        trial.read([summary], self._sweep.metric_name)
        trial.rows = int(summary.get("_step", -1)) + 1
        return trial

    def run(self, folder: Path, *, agents: int, count: int | None) -> int:
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
        shares = [[]] * agents
        if count is not None:  # as even as it goes
            sizes = [len(range(each, count, agents)) for each in range(agents)]
            shares = [["--count", str(size)] for size in sizes if size]
        with noted_signals() as came:
            running = [
                subprocess.Popen(
                    [*agent, *share, self.path],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=sys.stderr,
                    start_new_session=True,  # the terminal's Ctrl-C is for the sweep
                )
                for share in shares
            ]
            passed_on = 0
            while any(each.poll() is None for each in running):
                if len(came) > passed_on:
                    passed_on = len(came)
                    for each in running:
                        each.terminate()
                time.sleep(_TICK)
        return 128 + came[0] if came else 0


@contextlib.contextmanager
def _as_our_error(
    remedy: str = "Or run this file without a server: --offline.",
) -> Iterator[None]:
    import wandb

    try:
        yield
    except (wandb.Error, ValueError, OSError) as error:
        raise TrainkitError(
            f"trainkit sweep: W&B reports: {error} Check `wandb login` and the "
            f"network. {remedy}"
        ) from error
