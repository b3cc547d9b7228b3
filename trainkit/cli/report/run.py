"""What the folder of a run tells: its charts, its throughput, and how it ended."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainkit.cli.report.charts import Chart, Line, choose, read_lines
from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.runs.summary_rows import Row, rows, throughput_text
from trainkit.core.plan.effective_batch import EffectiveBatch
from trainkit.errors import TrainkitError
from trainkit.lit.logs.metric_file import read_rows

STEP_TIMES = "step_times.csv"
"""The file in the folder of a run."""
COLUMNS = ("step", "seconds", "waiting", "samples", "tokens", "padding")
"""What it has of each optimizer step: `waiting` are the seconds of `seconds` in which
the next batch was waited for, and `tokens` those that do not pad."""

StepTimes = dict[str, np.ndarray]
"""The columns of the file, and `steps`: how many optimizer steps a row is of."""


@dataclass(frozen=True)
class Run:
    """What the folder of a run tells; the run may be under way.

    Attributes:
        name: how its configuration calls it.
        charts: none if no number was logged yet.
        left_out: the columns that no chart shows.
        rows: the table of how it ended.
    """

    folder: RunFolder
    name: str
    charts: list[Chart]
    left_out: list[str]
    rows: list[Row]


def read_run(folder: RunFolder) -> Run:
    """Read the folder of a run.

    Raises:
        TrainkitError: a file of it is damaged.
    """
    columns = folder.read(folder.METRICS, lambda path: read_lines(read_rows(path)))
    times = folder.read(STEP_TIMES, read_step_times)
    facts = folder.read_summary()
    last = max((line.shown[-1][0] for line in columns.values()), default=0.0)
    columns |= rates(times)
    charts, left_out = choose(columns, unit=facts.get("unit", ""))
    speed = throughput(times)
    if facts:
        found = folder.read(folder.SUMMARY, lambda _: _rows(facts, speed))
        if last > facts["steps"]:
            found.insert(1, ("since then", f"resumed, up to step {last:,.0f}"))
    else:  # it was killed, or is under way
        said = f"has not ended, or was killed; its last row is of step {last:,.0f}"
        lines = [(chart, line) for chart in charts for line in chart.lines]
        ends = [(x.name, c.last(x)) for c, x in lines if x.colour == "validation"]
        found = [("training", said), *ends]
        if speed is not None:
            found.append(("throughput", throughput_text(**speed)))
    name = str(facts.get("name") or folder.path.name)
    return Run(folder, name, charts, left_out, found)


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
    found = {}
    for counted in ("tokens", "samples"):
        if whole.get(f"{counted}_per_second") is not None:
            each = (times[counted] / times["seconds"]).tolist()
            name = f"{counted} per second"
            found[name] = Line(name, times["step"].tolist(), each)
    return found


def _share(part: float, whole: float) -> float | None:
    return part / whole if math.isfinite(part) and whole > 0 else None


def throughput_of(folder: RunFolder) -> dict[str, Any] | None:
    """The throughput of a run as far as it is known, for `summary.json`."""
    try:
        return throughput(folder.read(STEP_TIMES, read_step_times))
    except (OSError, TrainkitError):  # the report names the damage
        return None


def _rows(facts: dict[str, Any], speed: dict[str, Any] | None) -> list[Row]:
    """The table of how a run ended; a resumed run has an old one until it ends."""
    found = rows({**facts, "throughput": speed or facts.get("throughput")})
    batch = facts.get("effective_batch")
    if batch:
        names = ("micro_batch", "accumulate", "replicas", "unit")
        size = EffectiveBatch(**{name: batch[name] for name in names})
        found.append(("last step", str(size)))
    if facts.get("seconds") is not None:
        found.append(("time", f"{facts['seconds']:,.1f} s"))
    versions = [f"{name} {number}" for name, number in facts["versions"].items()]
    found.append(("versions", ", ".join(versions)))
    commit = facts.get("git_commit")
    return [*found, ("commit", commit)] if commit else found
