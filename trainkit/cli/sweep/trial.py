"""One trial of a sweep: its arguments, and how it went."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["waiting", "running", "finished", "stopped", "crashed"]
"""States of a trial. "stopped" means by early_terminate, which is not a failure."""


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
        asked: its number in Optuna's study.
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
    asked: int = 0

    def __str__(self) -> str:
        """The trial's name, state and arguments in one line.

        >>> print(Trial(name="t", arguments={"lr": 1, "net": {"width": 8}}))
        t waiting: lr=1 net.width=8
        """
        words = (f"{name}={value}" for name, value in self.flat.items())
        return f"{self.name} {self.state}: {' '.join(words)}"

    @property
    def is_over(self) -> bool:
        return self.state in ("finished", "stopped", "crashed")

    @property
    def number(self) -> float | None:
        """The metric's last value if it is a finite number; else None."""
        is_finite = self.metric and math.isfinite(self.metric[-1])
        return self.metric[-1] if is_finite else None

    @property
    def flat(self) -> dict[str, Any]:
        """The arguments by their dotted names."""
        return flatten(self.arguments)

    def read(self, rows: Sequence[Mapping[str, Any]], metric: str | None) -> None:
        """Note what the trial has logged, without W&B's own columns.

        >>> trial = Trial(name="t", arguments={})
        >>> trial.read([{"loss": 2, "_step": 0}, {"loss": "NaN", "a": "b"}], "loss")
        >>> trial.metric, trial.logged, trial.num_rows
        ([2.0, nan], ['loss'], 2)
        """
        numbers = [
            {name: float(value) for name, value in row.items() if _is_logged(value)}
            for row in rows
        ]
        names = dict.fromkeys(name for row in numbers for name in row)
        self.metric = [row[metric] for row in numbers if metric in row]
        self.logged = [name for name in names if not name.startswith("_")]
        self.num_rows = len(rows)


def _is_logged(value: Any) -> bool:
    """Whether a value is a number, also one that JSON has no sign for."""
    return is_number(value) or value in ("NaN", "Infinity", "-Infinity")


def is_number(value: Any) -> bool:
    """Whether a value is a number, and not true or false."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def flatten(arguments: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Arguments by dotted name.

    >>> flatten({"a": 1, "b": {"c": {"d": 2}}})
    {'a': 1, 'b.c.d': 2}
    """
    flat = {}
    for name, value in arguments.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def ranked(trials: Sequence[Trial], *, maximizes: bool) -> list[Trial]:
    """Trials with the best first, and those whose metric is not a number last."""
    sign = -1 if maximizes else 1
    return sorted(
        trials, key=lambda each: (each.number is None, sign * (each.number or 0.0))
    )


def best_of(trials: Sequence[Trial], *, maximizes: bool) -> Trial | None:
    """The best of the finished trials; a stopped trial has trained only in part."""
    ended = [t for t in trials if t.state == "finished" and t.number is not None]
    return next(iter(ranked(ended, maximizes=maximizes)), None)
