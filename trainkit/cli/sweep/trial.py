"""One trial of a sweep: its arguments, and how it went."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trainkit.cli.sweep.parameters import flatten

State = Literal["waiting", "running", "finished", "stopped", "crashed"]
"""States of a trial. "stopped" means by early_terminate, which is not a failure."""

_OF_WANDB: dict[str, State] = {
    "pending": "waiting",
    "running": "running",
    "finished": "finished",
    "killed": "stopped",
}
"""The state of a trial by its run's on the server; any other means that it crashed."""


@dataclass(kw_only=True)
class Trial:
    """A trial of a sweep, with its state and results.

    Attributes:
        name: the id of its W&B run.
        arguments: the proposed values, nested as in the file.
        metric: the metric's values, in the order in which they were logged.
        logged: the names that it logged with numbers.
        num_rows: how many rows it logged.
        exit_code: the exit status of its process.
        pid: the number of its process, while it runs.
        note: a remark, for example why it crashed.
        folder: the folder of its files.
    """

    name: str
    arguments: dict[str, Any]
    state: State = "waiting"
    metric: list[float] = field(default_factory=list)
    logged: list[str] = field(default_factory=list)
    num_rows: int = 0
    exit_code: int | None = None
    pid: int | None = None
    note: str = ""
    folder: str = ""

    @property
    def is_over(self) -> bool:
        return self.state in ("finished", "stopped", "crashed")

    @property
    def value(self) -> float | None:
        """The metric's last value, as W&B's summary shows it."""
        return self.metric[-1] if self.metric else None

    @property
    def number(self) -> float | None:
        """The metric's last value if it is a finite number; else None."""
        value = self.value
        return value if value is not None and math.isfinite(value) else None

    @property
    def flat(self) -> dict[str, Any]:
        """The arguments by their dotted names."""
        return flatten(self.arguments)


def news_of(trial: Trial, metric: str | None) -> str:
    """A trial's state in one line, with its arguments and its metric.

    >>> trial = Trial(name="t", arguments={"lr": 1}, state="stopped", metric=[0.5])
    >>> news_of(trial, "loss")
    't stopped: lr=1, loss 0.5'
    """
    parts = [f"{trial.name} {trial.state}: {describe(trial)}"]
    if trial.value is not None:
        parts.append(f"{metric} {trial.value:.6g}")
    return ", ".join([*parts, trial.note] if trial.note else parts)


def describe(trial: Trial) -> str:
    """A trial's arguments in one line.

    >>> describe(Trial(name="t", arguments={"optimizer": {"lr": 0.1}, "seed": 0}))
    'optimizer.lr=0.1 seed=0'
    """
    return " ".join(f"{name}={value}" for name, value in trial.flat.items())


def state_from_wandb(state: str) -> State:
    """The state of a trial whose run has this state on the server.

    >>> state_from_wandb("killed"), state_from_wandb("failed")
    ('stopped', 'crashed')
    """
    return "waiting" if state[:7] == "preempt" else _OF_WANDB.get(state, "crashed")


def ranked(trials: Sequence[Trial], *, maximizes: bool) -> list[Trial]:
    """Trials with the best first, and those whose metric is not a number last.

    >>> a = Trial(name="a", arguments={}, metric=[2.0])
    >>> b = Trial(name="b", arguments={}, metric=[1.0])
    >>> [trial.name for trial in ranked([a, b], maximizes=False)]
    ['b', 'a']
    """
    sign = -1 if maximizes else 1

    def key(trial: Trial) -> tuple[bool, float]:
        return trial.number is None, sign * (trial.number or 0.0)

    return sorted(trials, key=key)


def best_of(trials: Sequence[Trial], *, maximizes: bool) -> Trial | None:
    """The best of the finished trials; a stopped trial has trained only in part."""
    ended = [t for t in trials if t.state == "finished" and t.number is not None]
    return next(iter(ranked(ended, maximizes=maximizes)), None)
