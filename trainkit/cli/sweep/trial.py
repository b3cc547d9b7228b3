"""One trial of a sweep: its arguments, and how it went."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from trainkit.cli.sweep.parameters import flatten

State = Literal["waiting", "running", "finished", "stopped", "crashed"]
"""States of a trial; "stopped" means by early_terminate, which is not a failure."""

_OF_WANDB: dict[str, State] = {
    "finished": "finished",
    "killed": "stopped",
    "preempted": "waiting",
    "preempting": "waiting",
    "pending": "waiting",
    "running": "running",
}


@dataclass(kw_only=True)
class Trial:
    """A trial of a sweep, with its state and results.

    Attributes:
        name: the W&B run's id.
        arguments: as proposed, nested as in the file.
        state: its progress.
        metric: the metric's values, in the order they were logged.
        num_rows: how many rows it logged.
        exit_code: of its process.
        note: a remark, for example why it crashed.
        folder: the folder of its files.
    """

    name: str
    arguments: dict[str, Any]
    state: State = "waiting"
    metric: list[float] = field(default_factory=list)
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
    def flat(self) -> dict[str, Any]:
        """The arguments by their dotted names."""
        return flatten(self.arguments)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def describe(trial: Trial) -> str:
    """A trial's arguments in one line.

    >>> describe(Trial(name="t", arguments={"optimizer": {"lr": 0.1}, "seed": 0}))
    'optimizer.lr=0.1 seed=0'
    """
    return " ".join(f"{name}={value}" for name, value in trial.flat.items())


def state_from_wandb(state: str) -> State:
    """A server's word for a run's state.

    >>> state_from_wandb("killed"), state_from_wandb("failed")
    ('stopped', 'crashed')
    """
    return _OF_WANDB.get(state, "crashed")


def ranked(trials: list[Trial], *, maximizes: bool) -> list[Trial]:
    """The best first; trials whose metric is not a number last.

    >>> a = Trial(name="a", arguments={}, metric=[2.0])
    >>> b = Trial(name="b", arguments={}, metric=[1.0])
    >>> [trial.name for trial in ranked([a, b], maximizes=False)]
    ['b', 'a']
    """
    sign = -1 if maximizes else 1

    def key(trial: Trial) -> tuple[bool, float]:
        if trial.value is None or not math.isfinite(trial.value):
            return True, 0.0
        return False, sign * trial.value

    return sorted(trials, key=key)


def best_of(trials: list[Trial], *, maximizes: bool) -> Trial | None:
    """The best of the finished trials; a stopped one trained only in part."""
    ended = [trial for trial in trials if trial.state == "finished"]
    first = ranked(ended, maximizes=maximizes)[:1]
    has_number = [t for t in first if t.value is not None and math.isfinite(t.value)]
    return has_number[0] if has_number else None


def own_lines(lines: Sequence[str]) -> list[str]:
    """The lines that a trial has written, without the output of W&B's client.

    >>> own_lines(["wandb: Syncing run", "", "RuntimeError: no"])
    ['RuntimeError: no']
    """
    return [line for line in lines if line.strip() and not line.startswith("wandb:")]
