"""A sweep without a server, which proposes, runs, reads and stops its trials."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.sweep import environment
from trainkit.cli.sweep.command import command_line, hydra_text
from trainkit.cli.sweep.interruption import exit_status, noted_signals
from trainkit.cli.sweep.missing_metric import finished_without
from trainkit.cli.sweep.offline.journal import Journal
from trainkit.cli.sweep.offline.process import TrialProcess, end_orphan
from trainkit.cli.sweep.rows import last_words, metric_values, names_in, read_rows
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
        self._stops_early = journal.config.get("early_terminate") is not None
        self._may_start = float("inf") if count is None else count
        self._say = say
        self._running: list[TrialProcess] = []
        self._interrupted: list[TrialProcess] = []
        self._crashed_first = 0
        self._is_over = finished_without(sweep, journal.trials) is not None
        self._look_at = 0.0

    def run(self) -> int:
        """Run the sweep until every trial is over.

        Returns:
            0, or 130 or 143 if a signal ended it.
        """
        self._recover()
        with noted_signals() as came:
            while True:
                self._take_ended()
                if came:
                    self._interrupt(num_signals=len(came))
                else:
                    self._start_more()
                if not self._running:
                    return exit_status(came)
                self._stop_the_poor()
                time.sleep(_TICK)

    def _recover(self) -> None:
        """Queue the trials that were running when the sweep was killed."""
        for trial in self._journal.trials:
            if trial.state == "running":
                if end_orphan(trial):
                    self._say(f"{trial.name} was still running, and has been stopped")
                trial.state = "waiting"
                self._journal.save(trial)

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
        waiting = (t for t in self._journal.trials if t.state == "waiting")
        return next(waiting, None) or self._journal.propose()

    def _start(self, trial: Trial) -> None:
        trial.state, trial.pid, trial.note = "running", None, ""
        self._journal.save(trial)
        command = self._command(trial)
        env = environment.offline(
            self._journal.config, trial, group=self._journal.folder.name
        )
        self._say(f"{trial.name} starts: {describe(trial)}")
        try:
            self._running.append(TrialProcess(trial, command, env))
            self._journal.save(trial)
        except OSError as error:
            self._crash(trial, f"{command[0]}: {error.strerror}")

    def _command(self, trial: Trial) -> list[str]:
        folder, more, checkpoint = Path(trial.folder), [], None
        if self._sweep.runs_trainkit:
            more.append(f"hydra.run.dir={hydra_text(trial.folder)}")
            checkpoint = RunFolder(folder).newest_checkpoint()
        if checkpoint is not None:
            more.append(f"ckpt_path={hydra_text(str(checkpoint))}")
        else:
            # The rows of an earlier attempt must not be uploaded as well.
            shutil.rmtree(folder if more else folder / "wandb", ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
        file = folder / "arguments.json"
        file.write_text(json.dumps(trial.arguments) + "\n", encoding="utf-8")
        return command_line(
            self._journal.config, trial.arguments, more=more, json_file=str(file)
        )

    def _take_ended(self) -> None:
        for process in list(self._running):
            code = process.poll()
            if code is not None:
                self._running.remove(process)
                self._take(process, code)

    def _take(self, process: TrialProcess, code: int) -> None:
        trial = process.trial
        self._read(trial)
        trial.exit_code = code
        folder = Path(trial.folder)
        summary = RunFolder(folder).read_summary() or {}
        # A trial may have finished before it was asked to stop.
        was_stopped = process.asked_to_stop and summary.get("status") != "finished"
        if was_stopped and process in self._interrupted:
            trial.state, trial.pid = "waiting", None
            self._journal.save(trial)
        elif was_stopped:
            self._end(trial, "stopped", f"stopped after {len(trial.metric)} values")
        elif code != 0:
            self._crash(trial, f"exit {code}: {last_words(folder)}")
        else:
            lacks = self._sweep.metric is not None and not trial.metric
            rows = f"no {self._sweep.metric} in the {trial.num_rows} rows it logged"
            self._end(trial, "finished", f"{rows} to {folder}" if lacks else "")
            if finished_without(self._sweep, self._journal.trials):
                self._is_over = True  # the next ones would lack the metric too

    def _end(self, trial: Trial, state: State, note: str) -> None:
        trial.state, trial.note, trial.pid = state, note, None
        self._journal.save(trial)
        self._say(news_of(trial, self._sweep.metric))

    def _crash(self, trial: Trial, note: str) -> None:
        self._end(trial, "crashed", note)
        self._crashed_first += 1
        limit = environment.max_initial_failures()
        has_good = any(t.state in ("finished", "stopped") for t in self._journal.trials)
        if not has_good and self._crashed_first >= limit and not self._is_over:
            self._is_over = True
            self._say(
                f"the first {self._crashed_first} trials crashed, so no more are "
                f"started. The last one's output is in {trial.folder}/output.log"
            )

    def _interrupt(self, *, num_signals: int) -> None:
        """Stop the running trials, for a later resume; a second signal kills them."""
        if self._running and not self._interrupted:
            self._say(
                f"stopping {len(self._running)} running trials, which may save "
                f"first; Ctrl-C again kills them"
            )
        for process in self._running:
            if num_signals > 1:
                process.kill()
            elif not process.asked_to_stop:
                process.stop()
                self._interrupted.append(process)

    # ---- metrics ---------------------------------------------------------------------

    def _read(self, trial: Trial) -> None:
        rows = read_rows(trial)
        trial.num_rows = len(rows)
        trial.logged = names_in(rows)
        trial.metric = metric_values(rows, self._sweep.metric)

    def _stop_the_poor(self) -> None:
        began = time.monotonic()
        if not self._stops_early or began < self._look_at:
            return
        for process in self._running:
            self._read(process.trial)
        poor = self._journal.search.to_stop(self._journal.trials)
        for process in self._running:
            if process.trial.name in poor:
                process.stop()
        spent = time.monotonic() - began
        self._look_at = began + spent + max(_LOOK_EVERY, _PAUSE_PER_LOOK * spent)
