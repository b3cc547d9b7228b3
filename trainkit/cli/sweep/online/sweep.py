"""A sweep on a W&B server, whose trials are run by agents of W&B's client."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from trainkit.cli.sweep import environment, missing_metric
from trainkit.cli.sweep.interruption import counted_signals
from trainkit.cli.sweep.online.agent_log import last_words_of, was_stopped
from trainkit.cli.sweep.online.agents import Agents
from trainkit.cli.sweep.online.local_runs import local_trials
from trainkit.cli.sweep.online.server import Server
from trainkit.cli.sweep.sweep_file import SweepFile
from trainkit.cli.sweep.trial import Trial, news_of
from trainkit.errors import TrainkitError

_TICK = 0.2
_LOOK_EVERY = 10.0
_LOST_AFTER = 120.0
_FINISH_TIMEOUT = "600"


class OnlineSweep:
    """Runs agents on a sweep until it is over, and reports the states of its trials.

    An agent waits forever for a server that has died, so the sweep checks the server
    too. After `lost_after` seconds without an answer it starts no more trials. Running
    trials continue to their end, and their rows are on disk.

    Args:
        sweep: the file.
        server: the server of the sweep.
        sweep_id: the sweep's id on the server.
        folder: where the agents and their trials write.
        lost_after: how many seconds the server may be silent.
        look_every: seconds between two requests.
        say: called with each line of news.
    """

    def __init__(
        self,
        sweep: SweepFile,
        server: Server,
        sweep_id: str,
        *,
        folder: Path,
        lost_after: float = _LOST_AFTER,
        look_every: float = _LOOK_EVERY,
        say: Callable[[str], None] = print,
    ) -> None:
        self._sweep = sweep
        self._server = server
        self._id = sweep_id
        self._folder = folder
        self._lost_after = lost_after
        self._look_every = look_every
        self._say = say
        self._states: dict[str, str] = {}
        self._answered = self._look_at = time.monotonic()
        self._without_metric: str | None = None
        self._has_given_up = False
        self._is_lost = False

    def run(self, *, agents: int, count: int | None) -> int:
        """Run the agents until they leave.

        Returns:
            0, or 130 or 143 if a signal ended it.
        """
        path = self._server.path(self._id)
        with counted_signals() as interruption:
            running = Agents(
                path, number=agents, count=count, env=self._env(), folder=self._folder
            )
            try:
                while running.are_running() and not interruption.count:
                    self._look(running)
                    time.sleep(_TICK)
            finally:
                if running.are_running():
                    self._say("stopping the agents; running trials may save first")
                    running.stop()
        if not interruption.count and self._server.is_alive():
            self._report_changes(running)
        return interruption.exit_status

    def trials(self) -> list[Trial]:
        """The trials on the server, or on this disk if the server does not answer."""
        if self._server.is_alive():
            try:
                return self._ask()
            except TrainkitError as error:
                self._say(str(error))
        self._say(
            f"the server does not answer, so the table shows the runs on this disk; "
            f"to upload them: `wandb sync --no-skip-online {self._folder}/wandb/run-*`"
        )
        return local_trials(self._folder, self._id, metric=self._sweep.metric)

    def _env(self) -> dict[str, str]:
        env = environment.base()
        env["WANDB_DIR"] = str(self._folder)
        env["WANDB_ENTITY"] = self._server.entity
        env["WANDB_PROJECT"] = self._server.project
        # A trial must not wait forever for a server that has died.
        env.setdefault("WANDB_FINISH_TIMEOUT", _FINISH_TIMEOUT)
        return env

    def _look(self, agents: Agents) -> None:
        if time.monotonic() < self._look_at:
            return
        if self._server.is_alive():
            self._answered = time.monotonic()
            self._report_changes(agents)
        silent = time.monotonic() - self._answered
        if silent > self._lost_after and not self._is_lost:
            self._is_lost = True
            self._say(
                f"the server has not answered for {silent:.0f} s: running trials "
                f"continue to their end, and no more are started"
            )
            agents.start_no_more()
        self._look_at = time.monotonic() + self._look_every

    def _ask(self) -> list[Trial]:
        trials = self._server.trials(self._id)
        for trial in trials:
            if trial.state == "crashed":
                trial.note = last_words_of(self._folder, trial.name)
        return trials

    def _report_changes(self, agents: Agents) -> None:
        try:
            trials = self._ask()
            for trial in trials:
                if self._states.get(trial.name) != trial.state:
                    self._states[trial.name] = trial.state
                    self._say(news_of(trial, self._sweep.metric))
            self._give_up_without_metric(trials, agents)
        except TrainkitError:
            return  # the server has just died; the next check will notice

    def _give_up_without_metric(self, trials: list[Trial], agents: Agents) -> None:
        stopped = [t.name for t in trials if was_stopped(self._folder, t.name)]
        trial = missing_metric.finished_without(self._sweep, trials, but=stopped)
        if trial is None or self._has_given_up:
            return
        # A server may receive the end before the last values: wait for a second look.
        if self._without_metric == trial.name or not agents.are_running():
            self._has_given_up = True
            logged = self._server.logged(trial.name)
            self._say(missing_metric.message(self._sweep, trial, logged))
            agents.start_no_more()
        self._without_metric = trial.name
