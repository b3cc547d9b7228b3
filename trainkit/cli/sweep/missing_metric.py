"""Finds that no trial logs the sweep's metric, once the first trial has finished."""

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
        but: names of trials that were stopped, and are finished to their server.
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
    """A message that says which metric a trial lacks, and what to do."""
    start = (
        f"{sweep.path} metric.name: {trial.name} finished and logged no "
        f"{sweep.metric}, nor did another trial. No more trials are started. "
    )
    if not logged and sweep.runs_trainkit:
        return start + "It logged nothing to W&B: write logger=wandb into `command`."
    if not logged:
        return start + "It logged nothing to W&B: its program needs wandb.log(...)."
    closest = difflib.get_close_matches(
        str(sweep.metric), logged, n=_MOST_NAMES, cutoff=0
    )
    more = len(logged) - len(closest)
    rest = f" and {more} more" if more else ""
    return (
        f"{start}It logged {', '.join(closest)}{rest}. Write one of these into "
        f"metric.name, and start a new sweep."
    )
