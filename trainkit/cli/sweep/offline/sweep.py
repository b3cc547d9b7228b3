"""A sweep without a server, which proposes, runs, reads and stops its trials."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.sweep.child_process import environment, exit_status, noted_signals
from trainkit.cli.sweep.command import command_line
from trainkit.cli.sweep.offline.journal import Journal
from trainkit.cli.sweep.offline.process import TrialProcess, end_orphan
from trainkit.cli.sweep.offline.rows import last_words, read_rows
from trainkit.cli.sweep.offline.search import is_poor
from trainkit.cli.sweep.sweep_file import SweepFile
from trainkit.cli.sweep.table import lacking
from trainkit.cli.sweep.trial import State, Trial
from trainkit.cli.sweep.whole_config import PARAMETERS, write_parameters
from trainkit.cli.words import quoted

_FLUSH = "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL"
_TICK = 0.1
_LOOK_EVERY = 1.0
"""The least number of seconds between two looks at the rows of running trials."""
_PAUSE_PER_LOOK = 2
"""The pause after a look, in times of its duration, since a look costs a process."""


class OfflineSweep:
    """Runs the trials of a sweep, several at once.

    Each change of a trial's state is on disk before anything else happens.

    Args:
        sweep: the file.
        journal: the trials so far.
        agents: how many trials run at once.
        count: how many trials may be started now; None for all.
        say: called with each line of news.
    """

    def __init__(
        self,
        sweep: SweepFile,
        journal: Journal,
        *,
        agents: int = 1,
        count: int | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self._sweep = sweep
        self._journal = journal
        self._agents = agents
        self._may_start = float("inf") if count is None else count
        self._may_crash = int(os.environ.get("WANDB_AGENT_MAX_INITIAL_FAILURES", 3))
        self._say = say
        self._running: list[TrialProcess] = []
        self._look_at = 0.0

    def run(self) -> int:
        """Run the sweep until every trial is over.

        Returns:
            0, or 130 or 143 if a signal ended it.
        """
        for trial in self._journal.trials:
            if trial.state == "running":  # the sweep was killed
                if end_orphan(trial):
                    self._say(f"{trial.name} was still running, and has been stopped")
                trial.state = "waiting"
                self._journal.save(trial)
        with noted_signals() as came:
            while True:
                for process in [p for p in self._running if p.poll() is not None]:
                    self._running.remove(process)
                    self._take(process)
                for process in self._running if came else ():
                    self._ask_to_end(process, at_once=len(came) > 1)
                while not came and (trial := self._next()) is not None:
                    self._start(trial)
                if not self._running:
                    return exit_status(came)
                self._stop_the_poor()
                time.sleep(_TICK)

    def _next(self) -> Trial | None:
        """The trial to start now, if there is one and an agent is free."""
        trials, is_busy = self._journal.trials, len(self._running) >= self._agents
        is_over = self._may_start < 1 or self._may_crash < 1
        if is_busy or is_over or lacking(self._sweep, trials):
            return None
        waiting = (trial for trial in trials if trial.state == "waiting")
        return next(waiting, None) or self._journal.propose()

    def _start(self, trial: Trial) -> None:
        self._may_start -= 1
        trial.state, trial.pid, trial.note = "running", None, ""
        self._journal.save(trial)
        command = self._command(trial)
        self._say(str(trial))
        try:
            self._running.append(TrialProcess(trial, command, self._env(trial)))
            self._journal.save(trial)
        except OSError as error:
            self._end(trial, "crashed", f"{command[0]}: {error.strerror}")

    def _command(self, trial: Trial) -> list[str]:
        """The words of a trial, whose folder is empty, or has its checkpoint."""
        folder, more, checkpoint = Path(trial.folder), [], None
        if self._sweep.runs_trainkit:
            more.append(f"hydra.run.dir={quoted(folder)}")
            checkpoint = RunFolder(folder).newest_checkpoint()
        if checkpoint is not None:
            more.append(f"ckpt_path={quoted(checkpoint)}")
        else:
            # The rows of an earlier attempt must not be uploaded as well.
            shutil.rmtree(folder if more else folder / "wandb", ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
        file = folder / "arguments.json"
        file.write_text(json.dumps(trial.arguments) + "\n", encoding="utf-8")
        return command_line(
            self._sweep, trial.arguments, more=more, json_file=str(file)
        )

    def _env(self, trial: Trial) -> dict[str, str]:
        """The environment of a trial that logs to W&B on this disk.

        `WANDB_SWEEP_ID` is not set, since the server will know no such sweep when the
        run is uploaded. The group holds the trials together instead.
        """
        env = environment()
        for key in ("project", "entity"):
            if value := getattr(self._sweep, key):
                env.setdefault(f"WANDB_{key.upper()}", str(value))
        if self._sweep.early_terminate is not None:
            env.setdefault(_FLUSH, "1")  # the default of 15 s comes too late for a stop
        return env | {
            "WANDB_MODE": "offline",
            "WANDB_RUN_ID": trial.name,
            "WANDB_RUN_GROUP": self._journal.folder.name,
            "WANDB_DIR": trial.folder,
            PARAMETERS: str(write_parameters(trial.arguments, Path(trial.folder))),
        }

    def _take(self, process: TrialProcess) -> None:
        """Note how a trial has ended."""
        trial, code = process.trial, process.poll()
        trial.read(read_rows(trial), self._sweep.metric_name)
        trial.exit_code = code
        summary = RunFolder(trial.folder).read_summary() or {}
        # A trial may have finished before it was asked to stop.
        if process.becomes is not None and summary.get("status") != "finished":
            note = f"stopped after {len(trial.metric)} values"
            self._end(trial, process.becomes, note)
        elif code:
            self._end(trial, "crashed", f"exit {code}: {last_words(trial)}")
        else:
            self._end(trial, "finished")

    def _end(self, trial: Trial, state: State, note: str = "") -> None:
        trial.state, trial.note, trial.pid = state, note, None
        self._journal.save(trial)
        value = [f"{self._sweep.metric_name} {each:.6g}" for each in trial.metric[-1:]]
        self._say(", ".join(filter(None, [str(trial), *value, note])))
        has_good = any(t.state in ("finished", "stopped") for t in self._journal.trials)
        if state == "crashed" and not has_good:
            self._may_crash -= 1
            if self._may_crash < 1:
                self._say(f"the first trials crashed, so no more start: {trial.folder}")

    def _ask_to_end(self, process: TrialProcess, *, at_once: bool) -> None:
        """Stop a trial after a signal; it may save first, unless a second one came."""
        if process.becomes is None:
            name = process.trial.name
            self._say(f"stopping {name}, which may save first; Ctrl-C again kills it")
        process.stop("waiting")
        if at_once:
            process.hurry()

    def _stop_the_poor(self) -> None:
        began = time.monotonic()
        if self._sweep.early_terminate is None or began < self._look_at:
            return
        for process in self._running:
            process.trial.read(read_rows(process.trial), self._sweep.metric_name)
        for process in self._running:
            if is_poor(self._sweep, process.trial, self._journal.trials):
                process.stop("stopped")
        spent = time.monotonic() - began
        self._look_at = began + spent + max(_LOOK_EVERY, _PAUSE_PER_LOOK * spent)
