"""A sweep without a server, which proposes, runs, reads and stops its trials."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.sweep import environment, missing_metric
from trainkit.cli.sweep.command import command_line, hydra_text
from trainkit.cli.sweep.interruption import Interruption, counted_signals
from trainkit.cli.sweep.offline.engine import Engine
from trainkit.cli.sweep.offline.process import TrialProcess, end_orphan, last_words
from trainkit.cli.sweep.offline.state import SweepState
from trainkit.cli.sweep.rows import metric_values, read_run, run_files
from trainkit.cli.sweep.sweep_file import SweepFile
from trainkit.cli.sweep.trial import State, Trial, describe, news_of

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
        state: the trials so far.
        agents: how many trials run at once.
        count: how many trials may be started now; None for all.
        say: called with each line of news.
    """

    def __init__(
        self,
        sweep: SweepFile,
        state: SweepState,
        *,
        agents: int = 1,
        count: int | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self._sweep = sweep
        self._state = state
        self._engine = Engine(state.config, seed=state.seed)
        self._agents = agents
        self._stops_early = state.config.get("early_terminate") is not None
        self._may_start = float("inf") if count is None else count
        self._say = say
        self._running: list[TrialProcess] = []
        self._crashed_first = 0
        self._is_over = False
        self._look_at = 0.0

    def run(self) -> int:
        """Run the sweep until every trial is over.

        Returns:
            0, or 130 or 143 if a signal ended it.
        """
        self._recover()
        self._give_up_without_metric()
        with counted_signals() as interruption:
            try:
                while not interruption.count:
                    self._take_ended()
                    self._start_more()
                    if not self._running:
                        break
                    self._stop_the_poor()
                    time.sleep(_TICK)
            finally:
                self._end_running(interruption)
        return interruption.exit_status

    # ---- before ----------------------------------------------------------------------

    def _recover(self) -> None:
        """Queue the trials that were running when the sweep was killed."""
        for trial in self._state.trials:
            if trial.state == "running":
                if end_orphan(trial, self._folder(trial)):
                    self._say(f"{trial.name} was still running, and has been stopped")
                trial.state = "waiting"
        self._state.save()

    # ---- trials ----------------------------------------------------------------------

    def _start_more(self) -> None:
        while not self._is_over and len(self._running) < self._agents:
            trial = self._next() if self._may_start > 0 else None
            if trial is None:
                self._is_over = True
                return
            self._may_start -= 1
            self._start(trial)

    def _next(self) -> Trial | None:
        for trial in self._state.trials:
            if trial.state == "waiting":
                return trial
        arguments = self._engine.propose(self._state.trials)
        if arguments is None:
            return None
        number = len(self._state.trials)
        trial = Trial(name=f"{self._state.id}-{number:03d}", arguments=arguments)
        trial.folder = str(self._folder(trial))
        self._state.trials.append(trial)
        return trial

    def _start(self, trial: Trial) -> None:
        folder = self._folder(trial)
        trial.state, trial.pid, trial.note = "running", None, ""
        self._state.save()
        command = self._command(trial, folder)
        env = environment.offline(
            self._state.config, trial, folder, group=self._state.id
        )
        self._say(f"{trial.name} starts: {describe(trial)}")
        try:
            self._running.append(TrialProcess(trial, command, env, folder))
        except OSError as error:
            self._crash(trial, f"{command[0]}: {error.strerror}")
        self._state.save()

    def _command(self, trial: Trial, folder: Path) -> list[str]:
        more = []
        checkpoint = None
        if self._sweep.runs_trainkit:
            more.append(f"hydra.run.dir={hydra_text(str(folder))}")
            checkpoint = RunFolder(folder).newest_checkpoint()
        if checkpoint is not None:
            more.append(f"ckpt_path={hydra_text(str(checkpoint))}")
        else:
            # The rows of an earlier attempt must not be uploaded as well.
            shutil.rmtree(folder if more else folder / "wandb", ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
        return command_line(
            self._state.config,
            trial.arguments,
            more=more,
            json_file=_write_json(trial, folder),
        )

    def _take_ended(self) -> None:
        for process in list(self._running):
            code = process.poll()
            if code is not None:
                self._running.remove(process)
                self._take(process, code)
                self._state.save()

    def _take(self, process: TrialProcess, code: int) -> None:
        trial = process.trial
        self._read(trial)
        trial.exit_code = code
        summary = RunFolder(self._folder(trial)).read_summary() or {}
        # A trial may have finished before it was asked to stop.
        if process.asked_to_stop and summary.get("status") != "finished":
            self._end(trial, "stopped", f"stopped after {len(trial.metric)} values")
        elif code != 0:
            self._crash(trial, f"exit {code}: {last_words(self._folder(trial))}")
        else:
            self._end(trial, "finished", "" if trial.metric else self._missing(trial))
            self._give_up_without_metric()

    def _end(self, trial: Trial, state: State, note: str) -> None:
        trial.state, trial.note, trial.pid = state, note, None
        self._say(news_of(trial, self._sweep.metric))

    def _crash(self, trial: Trial, note: str) -> None:
        self._end(trial, "crashed", note)
        self._crashed_first += 1
        limit = environment.max_initial_failures()
        ended_well = any(t.state in ("finished", "stopped") for t in self._state.trials)
        if not ended_well and self._crashed_first >= limit and not self._is_over:
            self._is_over = True
            self._say(
                f"the first {self._crashed_first} trials crashed, so no more are "
                f"started. The last one's output is in {self._folder(trial)}/output.log"
            )

    def _missing(self, trial: Trial) -> str:
        metric = self._sweep.metric
        if metric is None:
            return ""
        return f"no {metric} in the {trial.num_rows} rows it logged to {trial.folder}"

    def _give_up_without_metric(self) -> None:
        """Start no more trials if their rows lack the metric."""
        trials = self._state.trials
        if self._is_over or not missing_metric.finished_without(self._sweep, trials):
            return
        for process in self._running:  # a running trial may have the metric
            self._read(process.trial)
        trial = missing_metric.finished_without(self._sweep, trials)
        if trial is not None:
            self._is_over = True
            rows, _ = read_run(run_files(self._folder(trial), trial.name))
            logged = missing_metric.names_in(rows)
            self._say(missing_metric.message(self._sweep, trial, logged))

    # ---- metrics ---------------------------------------------------------------------

    def _read(self, trial: Trial) -> None:
        rows, _ = read_run(run_files(self._folder(trial), trial.name))
        trial.num_rows = len(rows)
        trial.metric = metric_values(rows, self._sweep.metric)

    def _stop_the_poor(self) -> None:
        began = time.monotonic()
        if not self._stops_early or began < self._look_at:
            return
        for process in self._running:
            self._read(process.trial)
        poor = self._engine.to_stop(self._state.trials)
        for process in self._running:
            if process.trial.name in poor:
                process.stop()
        spent = time.monotonic() - began
        self._look_at = began + spent + max(_LOOK_EVERY, _PAUSE_PER_LOOK * spent)

    # ---- the end ---------------------------------------------------------------------

    def _end_running(self, interruption: Interruption) -> None:
        """Stop the running trials after a signal or an error, for a later resume."""
        if self._running:
            self._say(
                f"stopping {len(self._running)} running trials, which may save "
                f"first; Ctrl-C again kills them"
            )
        before = interruption.count
        already_stopped = [p for p in self._running if p.asked_to_stop]
        for process in self._running:
            process.stop()
        while self._running:
            for process in list(self._running):
                if interruption.count > before:
                    process.kill()
                code = process.poll()
                if code is None:
                    continue
                self._running.remove(process)
                if process in already_stopped or not process.asked_to_stop:
                    self._take(process, code)  # it had ended by itself
                else:
                    self._read(process.trial)
                    process.trial.state, process.trial.pid = "waiting", None
            time.sleep(_TICK)
        self._state.save()

    def _folder(self, trial: Trial) -> Path:
        return self._state.folder / trial.name


def _write_json(trial: Trial, folder: Path) -> str:
    path = folder / "arguments.json"
    path.write_text(json.dumps(trial.arguments) + "\n", encoding="utf-8")
    return str(path)
