"""The report of a run, made from its folder."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from trainkit.cli.report.chart import Charts
from trainkit.cli.report.charts import choose
from trainkit.cli.report.page import page
from trainkit.cli.report.series import Series, read_series
from trainkit.cli.report.throughput import (
    STEP_TIMES,
    StepTime,
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


def write_report(folder: RunFolder, *, pictures: bool = True) -> bool:
    """Write `report.html` and, beside it, `pictures/`.

    Args:
        folder: the folder of a run, which may be under way.
        pictures: whether to write the PNGs.

    Returns:
        Whether there was a number to draw.

    Raises:
        TrainkitError: a file of the folder is damaged.
    """
    times = times_of(folder)
    charts = read_charts(folder, times)
    if not charts.shown:
        return False
    facts = read_facts(folder)
    text = page(
        charts,
        title=str(facts.get("name") or folder.path.name),
        where=str(folder.path),
        table=summary_table(summary_rows(facts, charts, times)),
        pictures=folder.path / folder.PICTURES if pictures else None,
    )
    folder.write(folder.REPORT, text)
    return True


def report_of_training(folder: RunFolder, *, pictures: bool) -> None:
    """Write the report of a training that has ended in this process.

    A failure is printed in one line: a training must not fail because of its report.
    """
    try:
        write_report(folder, pictures=pictures)
    except Exception as error:  # such as a damaged file, or a fault of matplotlib
        said = f"could not be drawn: {type(error).__name__}: {error}"
        print(f"trainkit | report: {said}", flush=True)


def throughput_of(folder: RunFolder) -> dict[str, Any] | None:
    """The throughput of a run as far as it is known, for `summary.json`."""
    try:
        return throughput(times_of(folder))
    except (OSError, TrainkitError):  # the report names the damage
        return None


def times_of(folder: RunFolder) -> list[StepTime]:
    """The time of each optimizer step of a run."""
    return _read(folder, STEP_TIMES, read_step_times)


def read_charts(folder: RunFolder, times: list[StepTime]) -> Charts:
    """The charts of a run, from `metrics.csv` and the files beside it."""
    plan = RatePlan.of_json(folder.read_rate_plan())
    columns = _read(folder, folder.METRICS, lambda path: read_series(read_rows(path)))
    columns |= {each.name: each for each in rates(times)}
    steps = tuple(step + 1.0 for step in plan.steps)  # rows count from 1
    planned = {
        name: Series(name, steps, tuple(values))
        for name, values in plan.rates.items()
        if values
    }
    return choose(
        columns,
        planned,
        why_no_plan=plan.why_not,
        unit=plan.unit,
        optimizers=plan.optimizers,
        speed=throughput(times),
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


def summary_rows(
    facts: dict[str, Any], charts: Charts, times: list[StepTime]
) -> list[Row]:
    """The rows of the table on top.

    A run that was killed has no summary, and a resumed run has an old one until it
    ends. The charts then know a later step.
    """
    last, measured = charts.last_step, throughput(times)
    if not facts:
        said = f"has not ended, or was killed; its last row is of step {last:,.0f}"
        speed = [("throughput", throughput_text(**measured))] if measured else []
        return [("training", said), *speed]
    found = rows({**facts, "throughput": measured or facts.get("throughput")})
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
