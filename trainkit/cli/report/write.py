"""The report of a run, made from its folder."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from trainkit.cli.report.chart import STEP, Charts
from trainkit.cli.report.charts import choose
from trainkit.cli.report.page import page
from trainkit.cli.report.series import Series, read_series
from trainkit.cli.report.throughput import STEP_TIMES, read_step_times, throughput
from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.runs.summary_rows import Row, rows
from trainkit.core.plan.effective_batch import EffectiveBatch
from trainkit.core.plan.rate_plan import RatePlan
from trainkit.errors import TrainkitError
from trainkit.lit.logs.metric_file import read_rows

_Read = TypeVar("_Read")
_SHOWN = {"status", "steps", "windows", "metrics", "micro_batching", "versions"}
_SHOWN |= {"learning_rates", "plain_accumulation"}
"""Entries without which a summary is damaged."""


def write_report(folder: RunFolder, *, pictures: bool = True) -> str | None:
    """Write `report.html` and, beside it, `pictures/`.

    Args:
        folder: the folder of a run, which may be under way.
        pictures: whether to draw the PNGs.

    Returns:
        What is missing from the report, or an empty text. None if no number was logged
        yet, so that there is nothing to write.

    Raises:
        TrainkitError: a file of the folder is damaged.
    """
    charts = read_charts(folder)
    if not charts.shown:
        return None
    facts = read_facts(folder)
    text = page(
        charts,
        title=str(facts.get("name") or folder.path.name),
        where=str(folder.path),
        summary=summary_rows(facts, charts),
    )
    folder.write(folder.REPORT, text)
    if pictures:
        try:
            from trainkit.cli.report.png import draw_all

            draw_all(charts, folder.path / folder.PICTURES)
        except ImportError as error:
            return f"no PNGs, for which matplotlib is needed ({error})"
    return ""


def report_of_training(folder: RunFolder, *, pictures: bool) -> None:
    """Write the report of a training that has ended in this process.

    A failure is printed in one line: a training must not fail because of its report.
    """
    try:
        missing = write_report(folder, pictures=pictures)
    except Exception as error:  # such as a damaged file, or a fault of matplotlib
        missing = f"could not be drawn: {type(error).__name__}: {error}"
    if missing:
        print(f"trainkit | report: {missing}", flush=True)


def read_charts(folder: RunFolder) -> Charts:
    """The charts of a run, from `metrics.csv` and the files beside it."""
    plan = RatePlan.of_json(folder.read_rate_plan())
    columns = _read(folder, folder.METRICS, lambda path: read_series(read_rows(path)))
    times = _read(folder, STEP_TIMES, read_step_times)
    columns |= {each.name: each for each in throughput(columns, times, plan.unit)}
    steps = tuple(step + 1.0 for step in plan.steps)  # rows count from 1
    planned = {
        name: Series(name, steps, tuple(rates))
        for name, rates in plan.rates.items()
        if rates
    }
    return choose(
        columns,
        planned,
        why_no_plan=plan.why_not,
        unit=plan.unit,
        optimizers=plan.optimizers,
    )


def _read(folder: RunFolder, name: str, read: Callable[[Path], _Read]) -> _Read:
    path = folder.path / name
    try:
        return read(path)
    except (csv.Error, ValueError) as error:
        raise TrainkitError(
            f"{path}: must be a table of numbers in UTF-8, and is damaged: {error}. "
            f"Mend it or remove it."
        ) from error


def summary_rows(facts: dict[str, Any], charts: Charts) -> list[Row]:
    """The rows of the table on top.

    A run that was killed has no summary, and a resumed run has an old one until it
    ends. The charts then know a later step.
    """
    steps = [
        step
        for chart in charts.shown
        if chart.over == STEP
        for line in chart.lines
        if line.role != "plan"
        for step, _ in line.series.shown
    ]
    last = max(steps, default=0)
    if not facts:
        said = f"has not ended, or was killed; its last row is of step {last:,.0f}"
        return [("training", said)]
    found = [_related(row, charts) for row in rows(facts)]
    if last > facts["steps"]:
        found.insert(1, ("since then", f"resumed, up to step {last:,.0f}"))
    batch = facts.get("effective_batch")
    if batch:
        names = ("micro_batch", "accumulate", "replicas", "unit")
        size = EffectiveBatch(**{name: batch[name] for name in names})
        found.append(("last step", str(size)))
    if facts.get("seconds") is not None:
        found.append(("time", f"{facts['seconds']:,.1f} s"))
    return [*found, *_origin(facts)]


def _related(row: Row, charts: Charts) -> Row:
    """The row; that of plain accumulation names the chart that belongs to it."""
    label, text = row
    has_gap = any(chart.key == "uniform_gap" for chart in charts.shown)
    if label != "plain accumulation" or not has_gap:
        return row
    return label, f"{text}; the chart Uniform gap shows how far its weights are off"


def _origin(facts: dict[str, Any]) -> Sequence[Row]:
    versions = [f"{name} {number}" for name, number in facts["versions"].items()]
    found = [("versions", ", ".join(versions))]
    if facts.get("git_commit"):
        found.append(("commit", facts["git_commit"]))
    return found


def read_facts(folder: RunFolder) -> dict[str, Any]:
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
