"""The trials of a sweep, the best first, as a table or as JSON."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from typing import Any

from trainkit.cli.aligned import aligned
from trainkit.cli.sweep.sweep_file import SweepFile
from trainkit.cli.sweep.trial import Trial, best_of, ranked


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
    content = {
        **about,
        "metric": sweep.metric_name,
        "goal": "maximize" if sweep.maximizes else "minimize",
        "best": best.name if best else None,
        "trials": [
            {
                "name": trial.name,
                "state": trial.state,
                "value": trial.number,
                "arguments": trial.flat,
                "rows": trial.num_rows,
                "exit_code": trial.exit_code,
                "note": trial.note,
                "folder": trial.folder,
            }
            for trial in ranked(trials, maximizes=sweep.maximizes)
        ],
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
        needs = "logger=wandb and a validation" if sweep.runs_trainkit else "wandb.log"
        return f"{start}, and no number at all: its `command` needs {needs}."
    close = difflib.get_close_matches(wanted, logged, n=12, cutoff=0)
    return (
        f"{start}, nor did another trial. It logged {', '.join(close)}. Write one of "
        f"these into metric.name, and start a new sweep."
    )
