"""How much a run trained on in a second: one measure, from its `step_times.csv`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from trainkit.cli.report.lines import Line
from trainkit.lit.logs.metric_file import read_rows

STEP_TIMES = "step_times.csv"
"""The file in the folder of a run."""
COLUMNS = ("step", "seconds", "waiting", "samples", "tokens", "padding")
"""What it has of each optimizer step: `waiting` are the seconds of `seconds` in which
the next batch was waited for, and `tokens` those that do not pad."""

StepTimes = dict[str, np.ndarray]
"""The columns of the file, and `steps`: how many optimizer steps a row is of."""


def read_step_times(path: Path) -> StepTimes:
    """The rows whose time is known, in the order of their steps.

    Of the rows of a step the last one counts.
    """
    rows = {float(row["step"]): row for row in read_rows(path)}
    cells = [
        [float(rows[step].get(name, math.nan)) for name in COLUMNS]
        for step in sorted(rows)
    ]
    table = np.array(cells).reshape(-1, len(COLUMNS))
    steps = np.diff(table[:, :1], axis=0, prepend=0)
    whole = np.hstack([steps, table])[table[:, 1] > 0]
    return dict(zip(("steps", *COLUMNS), whole.T, strict=True))


def throughput(times: StepTimes) -> dict[str, Any] | None:
    """What was trained on in a second of these steps, None where it is not known.

    This is the one measure: `summary.json` and the tables have it of all steps, and the
    charts of each.

    Returns:
        None if no step's time is known.
    """
    sums = {name: float(column.sum()) for name, column in times.items()}
    seconds = sums["seconds"]
    if not seconds:
        return None
    return {
        "steps": round(sums["steps"]),
        "seconds": seconds,
        "steps_per_second": sums["steps"] / seconds,
        "samples_per_second": _share(sums["samples"] or math.nan, seconds),
        "tokens_per_second": _share(sums["tokens"] or math.nan, seconds),
        "padding": _share(sums["padding"], sums["tokens"] + sums["padding"]),
        "waiting": _share(sums["waiting"], seconds),
    }


def rates(times: StepTimes) -> dict[str, Line]:
    """Each known rate as a column: that of every step."""
    whole = throughput(times) or {}
    return {
        f"{counted} per second": Line(
            f"{counted} per second",
            times["step"].tolist(),
            (times[counted] / times["seconds"]).tolist(),
        )
        for counted in ("tokens", "samples")
        if whole.get(f"{counted}_per_second") is not None
    }


def _share(part: float, whole: float) -> float | None:
    return part / whole if math.isfinite(part) and whole > 0 else None
