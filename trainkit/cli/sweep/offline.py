"""A sweep without a server, which Optuna proposes, and which survives any kill."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.sweep.process import (
    TrialProcess,
    end_orphan,
    environment,
    noted_signals,
)
from trainkit.cli.sweep.search import is_poor, propose
from trainkit.cli.sweep.sweep_file import SweepFile, nested
from trainkit.cli.sweep.trial import State, Trial, lacking
from trainkit.cli.sweep.whole_config import PARAMETERS, write_parameters
from trainkit.cli.words import quoted
from trainkit.errors import TrainkitError
from trainkit.pages.atomic_file import write_atomically

BEGUN = "sweep.json"
"""The file that is there once a sweep has begun: its seed and its configuration."""
_FLUSH = "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL"
_MOST_CRASHES = 3
"""So many first trials may crash, as with W&B's agent, before no more are started."""
_TICK = 0.1
_LOOK_EVERY = 5.0
"""Seconds between two looks at the rows of running trials, since each is a process."""


class OfflineSweep:
    """Runs the trials of a sweep, several at once.

    Each trial has a file in the sweep's folder, which is written whole with each change
    of its state, before anything else happens. A proposal depends only on the seed and
    these trials, so a sweep that is resumed proposes what it would have proposed.

    Args:
        sweep: the file.
        folder: the sweep's, which exists; its name is the sweep's id.
        seed: of a new sweep.
        say: called with each line of news.

    Raises:
        TrainkitError: the folder has another sweep.
    """

    def __init__(
        self,
        sweep: SweepFile,
        folder: Path,
        *,
        seed: str = "",
        say: Callable[[str], None] = print,
    ) -> None:
        begun = {"seed": seed, "config": sweep.config}
        if (folder / BEGUN).exists():
            begun = json.loads((folder / BEGUN).read_text())
        if begun["config"] != sweep.config:
            raise TrainkitError(
                f"trainkit sweep --resume: {sweep.path} has changed since "
                f"{folder.name} was started. Change it back, or leave --resume out to "
                f"start a new sweep."
            )
        write_atomically(folder / BEGUN, json.dumps(begun))
        files = sorted(folder.glob("*-*.json"), key=lambda path: (len(path.name), path))
        self.trials = [Trial(**json.loads(each.read_text())) for each in files]
        self._sweep, self._folder, self._seed = sweep, folder, begun["seed"]
        self._say = say
        self._running: list[TrialProcess] = []
        self._num_crashed = 0
        self._look_at = 0.0

    def run(self, *, agents: int = 1, count: int | None = None) -> int:
        """Run the sweep until every trial is over.

        Args:
            agents: how many trials run at once.
            count: how many trials may be started now; None for all.

        Returns:
            0, or 130 or 143 if a signal ended it.
        """
        self._recover()
        left = math.inf if count is None else count
        with noted_signals() as came:
            while True:
                for process in [p for p in self._running if p.poll() is not None]:
                    self._take(process)
                for process in self._running if came else ():
                    if process.becomes is None:
                        name = process.trial.name
                        self._say(f"stopping {name}; Ctrl-C again kills it")
                    process.stop("waiting", at_once=len(came) > 1)
                while not came and len(self._running) < agents and left > 0:
                    if (trial := self._next()) is None:
                        break
                    left -= 1
                    self._start(trial)
                if not self._running:
                    return 128 + came[0] if came else 0
                self._stop_the_poor()
                time.sleep(_TICK)

    def propose(self) -> Trial | None:
        """The next trial, or None at the sweep's end."""
        trial = propose(self._sweep, self.trials, self._seed)
        if trial is not None:
            trial.name = f"{self._folder.name}-{len(self.trials):03d}"
            trial.folder = str(self._folder / trial.name)
            self.trials.append(trial)
        return trial

    def save(self, trial: Trial) -> None:
        """Write a trial's file whole."""
        text = json.dumps(asdict(trial)) + "\n"
        write_atomically(self._folder / f"{trial.name}.json", text)

    def _recover(self) -> None:
        """Queue the trials that were running when the sweep was killed."""
        for trial in self.trials:
            if trial.state == "running":
                if end_orphan(trial):
                    self._say(f"{trial.name} was still running, and has been stopped")
                trial.state = "waiting"
                self.save(trial)

    def _next(self) -> Trial | None:
        """The trial to start now, if there is one."""
        is_over = self._num_crashed >= _MOST_CRASHES
        if is_over or lacking(self._sweep, self.trials):
            return None
        waiting = (trial for trial in self.trials if trial.state == "waiting")
        return next(waiting, None) or self.propose()

    def _start(self, trial: Trial) -> None:
        trial.state, trial.pid, trial.note = "running", None, ""
        self.save(trial)
        arguments = nested(self._sweep.parameters, trial.arguments)
        command = self._command(trial, arguments)
        env = self._env(trial, arguments)
        self._say(str(trial))
        try:
            self._running.append(TrialProcess(trial, command, env))
            self.save(trial)
        except OSError as error:
            self._end(trial, "crashed", f"{command[0]}: {error.strerror}")

    def _command(self, trial: Trial, arguments: dict[str, Any]) -> list[str]:
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
        return command_line(self._sweep, arguments, folder, more=more)

    def _env(self, trial: Trial, arguments: dict[str, Any]) -> dict[str, str]:
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
            "WANDB_RUN_GROUP": self._folder.name,
            "WANDB_DIR": trial.folder,
            PARAMETERS: str(write_parameters(arguments, Path(trial.folder))),
        }

    def _take(self, process: TrialProcess) -> None:
        """Note how a trial has ended."""
        self._running.remove(process)
        trial = process.trial
        trial.read(read_rows(trial), self._sweep.metric_name)
        trial.exit_code = process.poll()
        if process.becomes is not None:
            note = f"stopped after {len(trial.metric)} values"
            self._end(trial, process.becomes, note)
        elif trial.exit_code:
            note = f"exit {trial.exit_code}: {last_words(trial)}"
            self._end(trial, "crashed", note)
        else:
            self._end(trial, "finished")

    def _end(self, trial: Trial, state: State, note: str = "") -> None:
        trial.state, trial.note, trial.pid = state, note, None
        self.save(trial)
        value = [f"{self._sweep.metric_name} {each:.6g}" for each in trial.metric[-1:]]
        self._say(", ".join(filter(None, [str(trial), *value, note])))
        has_good = any(each.state in ("finished", "stopped") for each in self.trials)
        if state == "crashed" and not has_good:
            self._num_crashed += 1
            if self._num_crashed == _MOST_CRASHES:
                self._say(f"the first trials crashed, so no more start: {trial.folder}")

    def _stop_the_poor(self) -> None:
        if self._sweep.early_terminate is None or time.monotonic() < self._look_at:
            return
        for process in self._running:
            process.trial.read(read_rows(process.trial), self._sweep.metric_name)
        for process in self._running:
            if is_poor(self._sweep, process.trial, self.trials):
                process.stop("stopped")
        self._look_at = time.monotonic() + _LOOK_EVERY


def command_line(
    sweep: SweepFile,
    arguments: Mapping[str, Any],
    folder: Path,
    *,
    more: Sequence[str] = (),
) -> list[str]:
    """The words of one trial, made by W&B's client; `more` follows the arguments."""
    from wandb.sdk.launch.sweeps import utils

    given = {name: {"value": value} for name, value in arguments.items()}
    macros = utils.create_sweep_command_args({"args": given})
    file = folder / "arguments.json"
    file.write_text(*macros["args_json"], encoding="utf-8")
    macros |= {"env": ["/usr/bin/env"], "interpreter": [sys.executable]}
    macros["args_json_file"] = [str(file)]
    for name in ("args_no_hyphens", "args_override_hydra"):
        macros[name] = [*macros[name], *more]
    by_word = {f"${{{name}}}": words for name, words in macros.items()}
    words = utils.create_sweep_command(sweep.words)
    return [each for word in words for each in by_word.get(word, [word])]


def read_rows(trial: Trial) -> list[dict[str, Any]]:
    """The rows that a trial has written so far, read with W&B's own client.

    A resumed trial has several files, and repeats the steps after its checkpoint. Of
    several rows with one `_step` the last counts, as on the server.
    """
    rows: dict[Any, dict[str, Any]] = {}
    files = f"wandb/*run-*-{trial.name}/run-{trial.name}.wandb"
    for file in sorted(Path(trial.folder).glob(files)):
        words = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
        # A file that is being written may end inside a record: no check.
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        for line in done.stdout.splitlines():
            try:
                row = json.loads(line)["history"]["item"]
            except (json.JSONDecodeError, KeyError):
                continue
            rows[row.get("_step", len(rows))] = row
    return list(rows.values())


def last_words(trial: Trial) -> str:
    """The last line of a trial's output, without the lines of W&B's client."""
    text = Path(trial.folder, "output.log").read_text(errors="replace")
    lines = [line.strip() for line in text.splitlines()]
    own = [line for line in lines if line and not line.startswith("wandb:")]
    return own[-1] if own else ""
