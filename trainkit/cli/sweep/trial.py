"""The trials of a sweep: how each went, and the table of them."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trainkit.cli.console import aligned
from trainkit.cli.sweep.sweep_file import SweepFile, is_number

State = Literal["waiting", "running", "finished", "stopped", "crashed"]
"""States of a trial. "stopped" means by early_terminate, which is not a failure."""


@dataclass(kw_only=True)
class Trial:
    """A trial of a sweep, with its state and results.

    Attributes:
        name: the id of its W&B run.
        arguments: the proposed values, by dotted name.
        metric: the metric's values, in the order in which they were logged.
        logged: the names that it logged with numbers.
        note: a remark, for example why it crashed.
        folder: the folder of its files.
        drawn: what Optuna has drawn, by the dotted names of parameters.
    """

    name: str
    arguments: dict[str, Any]
    state: State = "waiting"
    metric: list[float] = field(default_factory=list)
    logged: list[str] = field(default_factory=list)
    note: str = ""
    folder: str = ""
    drawn: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """The trial's name, state and arguments in one line.

        >>> print(Trial(name="t", arguments={"lr": 1, "net.width": 8}))
        t waiting: lr=1 net.width=8
        """
        words = (f"{name}={value}" for name, value in self.arguments.items())
        return f"{self.name} {self.state}: {' '.join(words)}"

    @property
    def number(self) -> float | None:
        """The metric's last value if it is a finite number; else None."""
        is_finite = self.metric and math.isfinite(self.metric[-1])
        return self.metric[-1] if is_finite else None

    def read(self, rows: Sequence[Mapping[str, Any]], metric: str | None) -> None:
        """Note what the trial has logged, without W&B's own columns.

        >>> trial = Trial(name="t", arguments={})
        >>> trial.read([{"loss": 2, "_step": 0}, {"loss": "NaN", "a": "b"}], "loss")
        >>> trial.metric, trial.logged
        ([2.0, nan], ['loss'])
        """
        signless = ("NaN", "Infinity", "-Infinity")  # JSON has no sign for them
        numbers = [
            (name, float(value))
            for row in rows
            for name, value in row.items()
            if is_number(value) or value in signless
        ]
        self.metric = [value for name, value in numbers if name == metric]
        names = dict.fromkeys(name for name, _ in numbers)
        self.logged = [name for name in names if not name.startswith("_")]


def ranked(sweep: SweepFile, trials: Sequence[Trial]) -> list[Trial]:
    """Trials with the best first, and those whose metric is not a number last."""
    sign = -1 if sweep.maximizes else 1
    return sorted(trials, key=lambda t: (t.number is None, sign * (t.number or 0.0)))


def best_of(sweep: SweepFile, trials: Sequence[Trial]) -> Trial | None:
    """The best of the finished trials; a stopped trial has trained only in part."""
    ended = [t for t in trials if t.state == "finished" and t.number is not None]
    return next(iter(ranked(sweep, ended)), None)


def table(sweep: SweepFile, trials: Sequence[Trial]) -> str:
    """The table, with aligned columns."""
    best, names = best_of(sweep, trials), sweep.varied
    rows = [["", "trial", "state", sweep.metric_name or "metric", *names, "note"]]
    for trial in ranked(sweep, trials):
        values = [trial.metric[-1] if trial.metric else ""]
        values += [trial.arguments[name] for name in names]
        cells = [f"{x:.6g}" if isinstance(x, float) else str(x) for x in values]
        note = trial.note if trial.state != "finished" or not trial.metric else ""
        mark = "*" if trial is best else ""
        rows.append([mark, trial.name, trial.state, *cells, note])
    return "\n".join(aligned(rows))


def as_json(sweep: SweepFile, trials: Sequence[Trial], **about: Any) -> str:
    """The table as JSON; a metric that is not a finite number is null."""
    best = best_of(sweep, trials)
    keys = ("name", "arguments", "state", "note", "folder")
    rows = [
        {**{key: getattr(trial, key) for key in keys}, "value": trial.number}
        for trial in ranked(sweep, trials)
    ]
    about |= {"metric": sweep.metric_name, "best": best and best.name, "trials": rows}
    return json.dumps(about, indent=2, allow_nan=False)


def lacking(sweep: SweepFile, trials: Sequence[Trial]) -> str:
    """Which metric a trial has not logged, and what to do; empty if one trial has.

    Trials that crashed, or were stopped before their first value, do not count.
    """
    ended = [trial for trial in trials if trial.state == "finished"]
    if sweep.metric is None or not ended or any(trial.metric for trial in trials):
        return ""
    wanted, logged = sweep.metric.name, ended[0].logged
    start = f"{sweep.path} metric.name: {ended[0].name} finished and logged no {wanted}"
    if not logged:
        needs = "logger=wandb and a validation" if sweep.runs_trainkit else "wandb.log"
        return f"{start}, and no number at all: its `command` needs {needs}."
    close = difflib.get_close_matches(wanted, logged, n=12, cutoff=0)
    return (
        f"{start}, nor did another trial. It logged {', '.join(close)}. Write one of "
        f"these into metric.name, and start a new sweep."
    )
