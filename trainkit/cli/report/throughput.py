"""How much a run trained on in a second: one measure, from its `step_times.csv`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainkit.cli.report.line import Line
from trainkit.lit.logs.metric_file import read_rows

STEP_TIMES = "step_times.csv"
"""The file in the folder of a run."""
COLUMNS = ("step", "seconds", "waiting", "samples", "tokens", "padding")
"""What it has of each optimizer step: `waiting` are the seconds of `seconds` in which
the next batch was waited for, and `tokens` those that do not pad."""
RATES = {
    "tokens per second": "tokens_per_second",
    "samples per second": "samples_per_second",
}
"""The keys of the rates that are drawn, by the names of their charts."""

StepTime = dict[str, float]
"""A row of the file, NaN where a number is not known, and `steps`: how many optimizer
steps it is of."""


def read_step_times(path: Path) -> list[StepTime]:
    """The rows in the order of their steps; of a step's rows the last one counts.

    Raises:
        ValueError: the file is damaged.
    """
    found: dict[float, StepTime] = {}
    for row in read_rows(path):
        lacking = {"step", "seconds"} - row.keys()
        if lacking:
            raise ValueError(f"a row lacks {', '.join(sorted(lacking))}")
        known = {name: float(row.get(name, "nan")) for name in COLUMNS}
        found[known["step"]] = known
    rows = [found[step] for step in sorted(found)]
    before = 0.0
    for row in rows:
        row["steps"], before = row["step"] - before, row["step"]
    return rows


def throughput(rows: Sequence[StepTime]) -> dict[str, Any] | None:
    """What was trained on in a second of these steps, None where it is not known.

    This is the one measure: `summary.json` and the tables have it of all steps, and the
    charts of each. Steps whose time is not known are left out.

    Returns:
        None if no step's time is known.
    """
    known = [row for row in rows if row["seconds"] > 0]
    if not known:
        return None
    names = ("steps", *COLUMNS[1:])
    sums = {name: math.fsum(row[name] for row in known) for name in names}
    seconds = sums["seconds"]
    return {
        "steps": round(sums["steps"]),
        "seconds": seconds,
        "steps_per_second": sums["steps"] / seconds,
        "samples_per_second": _share(sums["samples"] or math.nan, seconds),
        "tokens_per_second": _share(sums["tokens"] or math.nan, seconds),
        "padding": _share(sums["padding"], sums["tokens"] + sums["padding"]),
        "waiting": _share(sums["waiting"], seconds),
    }


def rates(rows: Sequence[StepTime]) -> list[Line]:
    """Each known rate as a column: that of every step."""
    whole = throughput(rows) or {}
    each = [throughput([row]) or {} for row in rows]
    found = []
    for name, key in RATES.items():
        if whole.get(key) is None:
            continue
        values = [math.nan if of.get(key) is None else of[key] for of in each]
        while math.isnan(values[0]):  # before the first step time is not measured
            values.pop(0)
        steps = [row["step"] for row in rows]
        found.append(Line(name, steps[-len(values) :], values))
    return found


def _share(part: float, whole: float) -> float | None:
    return part / whole if math.isfinite(part) and whole > 0 else None
