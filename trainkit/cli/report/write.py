"""A run as its folder tells it, and the report of it."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trainkit.cli.report.chart import Charts
from trainkit.cli.report.charts import choose
from trainkit.cli.report.line import Line, read_lines
from trainkit.cli.report.page import page
from trainkit.cli.report.throughput import (
    STEP_TIMES,
    rates,
    read_step_times,
    throughput,
)
from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.runs.summary_rows import Row, rows, throughput_text
from trainkit.core.plan.effective_batch import EffectiveBatch
from trainkit.core.plan.rate_plan import RatePlan
from trainkit.errors import TrainkitError
from trainkit.lit.logs.metric_file import read_rows
from trainkit.pages.frame import summary_table

_Read = TypeVar("_Read")
_SHOWN = {"status", "steps", "windows", "metrics", "micro_batching", "versions"}
_SHOWN |= {"learning_rates", "plain_accumulation"}
"""Entries without which a summary is damaged."""


@dataclass(frozen=True)
class Run:
    """What the folder of a run tells; the run may be under way.

    Attributes:
        name: how its configuration calls it.
        charts: none if no number was logged yet.
        rows: the table of how it ended.
    """

    folder: RunFolder
    name: str
    charts: Charts
    rows: list[Row]


def read_run(folder: RunFolder) -> Run:
    """Read the folder of a run.

    Raises:
        TrainkitError: a file of it is damaged.
    """
    plan = RatePlan.of_json(folder.read_rate_plan())
    columns = _read(folder, folder.METRICS, lambda path: read_lines(read_rows(path)))
    times = _read(folder, STEP_TIMES, read_step_times)
    columns |= {line.name: line for line in rates(times)}
    steps = [step + 1.0 for step in plan.steps]  # rows count from 1
    planned = {n: Line(n, steps, rate) for n, rate in plan.rates.items() if rate}
    speed = throughput(times)
    charts = choose(
        columns,
        planned,
        why_no_plan=plan.why_not,
        unit=plan.unit,
        optimizers=plan.optimizers,
        speed=speed,
    )
    facts = _facts(folder)
    name = str(facts.get("name") or folder.path.name)
    return Run(folder, name, charts, _rows(facts, charts, speed))


def write_report(run: Run, *, pictures: bool = True) -> None:
    """Write `report.html` and, beside it, `pictures/`.

    Args:
        run: has charts.
        pictures: whether to write the PNGs.
    """
    folder = run.folder
    text = page(
        run.charts,
        title=run.name,
        where=str(folder.path),
        table=summary_table(run.rows),
        pictures=folder.path / folder.PICTURES if pictures else None,
    )
    folder.write(folder.REPORT, text)


def report_of_training(folder: RunFolder, *, pictures: bool) -> None:
    """Write the report of a training that has ended in this process.

    A failure is printed in one line: a training must not fail because of its report.
    """
    try:
        run = read_run(folder)
        if run.charts.shown:
            write_report(run, pictures=pictures)
    except Exception as error:  # such as a damaged file, or a fault of matplotlib
        said = f"could not be drawn: {type(error).__name__}: {error}"
        print(f"trainkit | report: {said}", flush=True)


def throughput_of(folder: RunFolder) -> dict[str, Any] | None:
    """The throughput of a run as far as it is known, for `summary.json`."""
    try:
        return throughput(_read(folder, STEP_TIMES, read_step_times))
    except (OSError, TrainkitError):  # the report names the damage
        return None


def _read(folder: RunFolder, name: str, read: Callable[[Path], _Read]) -> _Read:
    path = folder.path / name
    try:
        return read(path)
    except (csv.Error, ValueError) as error:
        raise TrainkitError(
            f"{path}: must be a table of numbers in UTF-8, and is damaged: {error}. "
            f"Mend it or remove it."
        ) from error


def _facts(folder: RunFolder) -> dict[str, Any]:
    """The content of `summary.json`; empty if there is none."""
    try:
        facts = folder.read_summary() or {}
        missing = sorted(_SHOWN - facts.keys()) if facts else []
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
    except (ValueError, AttributeError) as error:
        raise TrainkitError(
            f"{folder.path / folder.SUMMARY}: must be JSON, as a run writes it at its "
            f"end, and is damaged: {error}. Remove it."
        ) from error
    return facts


def _rows(
    facts: dict[str, Any], charts: Charts, speed: dict[str, Any] | None
) -> list[Row]:
    """The table of how a run ended.

    A run that was killed has no summary, and a resumed run has an old one until it
    ends. The charts then know a later step.
    """
    last = charts.last_step
    if not facts:
        said = f"has not ended, or was killed; its last row is of step {last:,.0f}"
        lines = [(chart, line) for chart in charts.shown for line in chart.lines]
        return [
            ("training", said),
            *((x.name, c.last(x)) for c, x in lines if x.colour == "validation"),
            *([("throughput", throughput_text(**speed))] if speed else []),
        ]
    found = rows({**facts, "throughput": speed or facts.get("throughput")})
    if any(chart.key == "uniform_gap" for chart in charts.shown):
        more = "; the chart Uniform gap shows how far its weights are off"
        found = [(a, b + more * (a == "plain accumulation")) for a, b in found]
    if last > facts["steps"]:
        found.insert(1, ("since then", f"resumed, up to step {last:,.0f}"))
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
