"""The trials of a sweep, the best first, as a table or as JSON."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from trainkit.cli.aligned import aligned
from trainkit.cli.sweep.sweep_file import SweepFile
from trainkit.cli.sweep.trial import Trial, best_of, ranked

_MOST_NAMES = 12


def lines(sweep: SweepFile, trials: Sequence[Trial]) -> list[str]:
    """The lines of the table, with aligned columns."""
    best = best_of(trials, maximizes=sweep.maximizes)
    metric = sweep.metric_name or "metric"
    rows = [["", "trial", "state", metric, *sweep.varied, "note"]]
    for trial in ranked(trials, maximizes=sweep.maximizes):
        values = trial.flat
        rows.append(
            [
                "*" if trial is best else "",
                trial.name,
                trial.state,
                brief(trial.metric[-1]) if trial.metric else "",
                *(brief(values.get(name, "")) for name in sweep.varied),
                trial.note if trial.state != "finished" or not trial.metric else "",
            ]
        )
    return aligned(rows)


def as_json(sweep: SweepFile, trials: Sequence[Trial], **about: Any) -> str:
    """The table as JSON; a metric that is not a finite number is null."""
    best = best_of(trials, maximizes=sweep.maximizes)
    shown = ("name", "state", "exit_code", "note", "folder")
    entries = [
        {key: value for key, value in asdict(trial).items() if key in shown}
        | {"value": trial.number, "arguments": trial.flat, "rows": trial.num_rows}
        for trial in ranked(trials, maximizes=sweep.maximizes)
    ]
    content = {
        **about,
        "metric": sweep.metric_name,
        "goal": "maximize" if sweep.maximizes else "minimize",
        "best": best.name if best else None,
        "trials": entries,
    }
    return json.dumps(content, indent=2, allow_nan=False)


def brief(value: Any) -> str:
    """The text of a value in a table.

    >>> brief(0.00012345678), brief("sqrt"), brief(8)
    ('0.000123457', 'sqrt', '8')
    """
    return f"{value:.6g}" if isinstance(value, float) else str(value)


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
        needs = "its program needs wandb.log(...)"
        if sweep.runs_trainkit:
            needs = "`command` needs logger=wandb, and steps enough for a validation"
        return f"{start}, and no number at all: {needs}."
    close = difflib.get_close_matches(wanted, logged, n=_MOST_NAMES, cutoff=0)
    return (
        f"{start}, nor did another trial. It logged {', '.join(close)}. Write one of "
        f"these into metric.name, and start a new sweep."
    )
