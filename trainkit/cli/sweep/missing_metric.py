"""Finds that no trial has logged the sweep's metric, and says what they logged."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from trainkit.cli.sweep.sweep_file import SweepFile
from trainkit.cli.sweep.trial import Trial

_MOST_NAMES = 12


def finished_without(sweep: SweepFile, trials: Sequence[Trial]) -> Trial | None:
    """The first trial that finished without a value, if no trial has one.

    Trials that crashed, or were stopped before their first value, do not count.
    """
    if sweep.metric is None or any(trial.metric for trial in trials):
        return None
    return next((trial for trial in trials if trial.state == "finished"), None)


def message(sweep: SweepFile, trial: Trial) -> str:
    """A message that says which metric a trial lacks, and what to do."""
    start = (
        f"{sweep.path} metric.name: {trial.name} finished and logged no "
        f"{sweep.metric}, nor did another trial. "
    )
    if not trial.logged:
        needs = "its program needs wandb.log(...)"
        if sweep.runs_trainkit:
            needs = "`command` needs logger=wandb, and steps enough for a validation"
        return f"{start}It logged no number to W&B: {needs}."
    closest = difflib.get_close_matches(
        str(sweep.metric), trial.logged, n=_MOST_NAMES, cutoff=0
    )
    more = len(trial.logged) - len(closest)
    rest = f" and {more} more" if more else ""
    return (
        f"{start}It logged {', '.join(closest)}{rest}. Write one of these into "
        f"metric.name, and start a new sweep."
    )
