"""A sweep whose trials do not log its metric, found when the first one finishes."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from trainkit.cli.sweep.rows import metric_values
from trainkit.cli.sweep.sweep_file import SweepFile
from trainkit.cli.sweep.trial import Trial

_MOST_NAMES = 12


def finished_without(
    sweep: SweepFile, trials: Sequence[Trial], *, but: Collection[str] = ()
) -> Trial | None:
    """The first trial that finished without a value, if no trial has one.

    Trials that crashed, or were stopped before their first value, do not count.

    Args:
        sweep: the file.
        trials: all of them.
        but: names of those that were stopped, though their server says finished.
    """
    if sweep.metric is None or any(trial.metric for trial in trials):
        return None
    ended = (t for t in trials if t.state == "finished" and t.name not in but)
    return next(ended, None)


def names_in(rows: Iterable[dict[str, Any]]) -> list[str]:
    """The names logged with numbers, without W&B's own columns.

    >>> names_in([{"_step": 0, "loss": 1.5}, {"loss": 1, "lr": "NaN", "kind": "a"}])
    ['loss', 'lr']
    """
    names = dict.fromkeys(
        name
        for row in rows
        for name in row
        if not name.startswith("_") and metric_values([row], name)
    )
    return list(names)


def message(sweep: SweepFile, trial: Trial, logged: Sequence[str]) -> str:
    """The message: what is missing, and what to do.

    Args:
        sweep: the file.
        trial: the one that finished.
        logged: what it logged instead.
    """
    start = (
        f"{sweep.path} metric.name: {trial.name} finished and logged no "
        f"{sweep.metric}, nor did another trial, so no more are started. "
    )
    if not logged and sweep.runs_trainkit:
        return start + "It logged nothing to W&B: write logger=wandb into `command`."
    if not logged:
        return start + "It logged nothing to W&B: its program needs wandb.log(...)."
    closest = sorted(logged, key=lambda name: -_likeness(name, str(sweep.metric)))
    more = len(closest) - _MOST_NAMES
    rest = f" and {more} more" if more > 0 else ""
    return (
        f"{start}It logged {', '.join(closest[:_MOST_NAMES])}{rest}. Write one of "
        f"these into metric.name, and start a new sweep."
    )


def _likeness(name: str, other: str) -> float:
    return difflib.SequenceMatcher(None, name, other).ratio()
