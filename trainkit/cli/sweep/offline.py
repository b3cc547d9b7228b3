"""A sweep without a server, which Optuna proposes, and which survives any kill."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.sweep.process import (
    KILL_DELAY,
    environment,
    noted_signals,
    started,
    wait_for_orphan,
)
from trainkit.cli.sweep.search import is_poor, propose
from trainkit.cli.sweep.sweep_file import SweepFile
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
        self._num_crashed = 0

    def run(self, *, agents: int = 1, count: int | None = None) -> int:
        """Run the sweep until every trial is over.

        Args:
            agents: how many trials run at once.
            count: how many trials may be started now; None for all.

        Returns:
            0, or 130 or 143 if a signal ended it.
        """
        for trial in self.trials:
            if trial.state == "running":  # when the sweep was killed
                wait_for_orphan(Path(trial.folder), self._say)
                trial.state = "waiting"
        left = math.inf if count is None else count
        running: list[Iterator[None]] = []
        with noted_signals() as came:
            while True:
                running = [each for each in running if next(each, "over") is None]
                while not came and len(running) < agents and left > 0:
                    if (trial := self._next()) is None:
                        break
                    left -= 1
                    self.save(trial, "running")
                    running.append(self._run(trial, came))
                if not running:
                    return 128 + came[0] if came else 0
                time.sleep(_TICK)

    def propose(self) -> Trial | None:
        """The next trial, or None at the sweep's end."""
        trial = propose(self._sweep, self.trials, self._seed)
        if trial is not None:
            trial.name = f"{self._folder.name}-{len(self.trials):03d}"
            trial.folder = str(self._folder / trial.name)
            self.trials.append(trial)
        return trial

    def save(self, trial: Trial, state: State, note: str = "") -> None:
        """Write a trial's file whole, with its new state."""
        trial.state, trial.note = state, note
        text = json.dumps(asdict(trial)) + "\n"
        write_atomically(self._folder / f"{trial.name}.json", text)

    def _next(self) -> Trial | None:
        """The trial to start now, if there is one."""
        is_over = self._num_crashed >= _MOST_CRASHES
        if is_over or lacking(self._sweep, self.trials):
            return None
        waiting = (trial for trial in self.trials if trial.state == "waiting")
        return next(waiting, None) or self.propose()

    def _run(self, trial: Trial, came: Sequence[int]) -> Iterator[None]:
        """Run a trial; each step of the iterator looks at it once.

        Args:
            trial: the trial.
            came: the signals for the sweep: the first one asks it to end, with SIGTERM
                and some time, and the next one ends it at once.
        """
        self._say(str(trial))
        command, env = self._command(trial), self._env(trial)
        becomes: State | None = None
        look_at, end_at = 0.0, math.inf
        try:
            process = started(command, env, Path(trial.folder))
        except OSError as error:
            self._end(trial, "crashed", f"{command[0]}: {error.strerror}")
            return
        while (code := process.poll()) is None:
            now = time.monotonic()
            if becomes is None and came:
                becomes = "waiting"
                self._say(f"stopping {trial.name}; Ctrl-C again kills it")
            elif becomes is None and self._sweep.early_terminate and now > look_at:
                trial.read(read_rows(trial), self._sweep.metric_name)
                look_at = time.monotonic() + _LOOK_EVERY
                if is_poor(self._sweep, trial, self.trials):
                    becomes = "stopped"
            if becomes is not None and end_at == math.inf:
                end_at = now + KILL_DELAY
                process.terminate()
            if len(came) > 1 or now > end_at:
                os.killpg(process.pid, signal.SIGKILL)
            yield
        trial.read(read_rows(trial), self._sweep.metric_name)
        if becomes is not None:
            self._end(trial, becomes, f"stopped after {len(trial.metric)} values")
        elif code:
            self._end(trial, "crashed", f"exit {code}: {last_words(trial)}")
        else:
            self._end(trial, "finished")

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
        return command_line(self._sweep, trial.arguments, folder, more=more)

    def _env(self, trial: Trial) -> dict[str, str]:
        """The environment of a trial that logs to W&B on this disk.

        `WANDB_SWEEP_ID` is not set, since the server will know no such sweep when the
        run is uploaded. The group holds the trials together instead.
        """
        env = environment()
        for key in ("project", "entity"):
            if value := getattr(self._sweep, key):
                env.setdefault(f"WANDB_{key.upper()}", str(value))
        # 15 s, the default, is too late for stops and kills.
        env.setdefault(_FLUSH, "1")
        return env | {
            "WANDB_MODE": "offline",
            "WANDB_RUN_ID": trial.name,
            "WANDB_RUN_GROUP": self._folder.name,
            "WANDB_DIR": trial.folder,
            PARAMETERS: str(write_parameters(trial.arguments, Path(trial.folder))),
        }

    def _end(self, trial: Trial, state: State, note: str = "") -> None:
        self.save(trial, state, note)
        value = [f"{self._sweep.metric_name} {each:.6g}" for each in trial.metric[-1:]]
        self._say(", ".join(filter(None, [str(trial), *value, note])))
        has_good = any(each.state in ("finished", "stopped") for each in self.trials)
        if state == "crashed" and not has_good:
            self._num_crashed += 1
            if self._num_crashed == _MOST_CRASHES:
                self._say(f"the first trials crashed, so no more start: {trial.folder}")


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
    files = f"wandb/*run-*/run-{trial.name}.wandb"
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
