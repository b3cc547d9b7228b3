"""A run as its folder tells it, and the report of it."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from trainkit.cli.report.charts import PLANNED, Chart, choose
from trainkit.cli.report.lines import Line, noise_lines, read_lines
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
from trainkit.errors import TrainkitError
from trainkit.lit.logs.metric_file import read_rows
from trainkit.pages.frame import table

_Read = TypeVar("_Read")


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
    columns = read(folder, folder.METRICS, lambda path: read_lines(read_rows(path)))
    last = max((line.shown[-1][0] for line in columns.values()), default=0.0)
    times = read(folder, STEP_TIMES, read_step_times)
    plan = read(folder, folder.RATE_PLAN, _read_json)
    columns |= noise_lines(columns) | rates(times)
    columns |= read(folder, folder.RATE_PLAN, lambda _: _planned(plan, columns))
    charts, left_out = choose(
        columns, unit=plan.get("unit", ""), no_plan=plan.get("why_not", "")
    )
    speed = throughput(times)
    facts = read(folder, folder.SUMMARY, _read_json)
    if facts:
        found = read(folder, folder.SUMMARY, lambda _: _rows(facts, speed))
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


def read(folder: RunFolder, name: str, how: Callable[[Path], _Read]) -> _Read:
    """What a file of a run holds; a file that was not written is as good as empty.

    Raises:
        TrainkitError: the file is damaged.
    """
    path = folder.path / name
    damages = (ValueError, TypeError, AttributeError, LookupError)
    try:
        return how(path)
    except (*damages, csv.Error, yaml.YAMLError) as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise TrainkitError(
            f"{path}: must be as a run writes it, and is damaged: {said}. Mend it or "
            f"remove it."
        ) from error


def write_report(run: Run, *, pictures: bool = True) -> None:
    """Write `report.html` of a run that has charts and, beside it, `pictures/`."""
    folder = run.folder
    text = page(
        run.charts,
        title=run.name,
        where=str(folder.path),
        top=table(run.rows),
        left_out=run.left_out,
        pictures=folder.path / folder.PICTURES if pictures else None,
    )
    folder.write(folder.REPORT, text)


def report_of_training(folder: RunFolder, *, pictures: bool) -> None:
    """Write the report of a training that has ended in this process.

    A failure is printed in one line: a training must not fail because of its report.
    """
    try:
        run = read_run(folder)
        if run.charts:
            write_report(run, pictures=pictures)
    except Exception as error:  # such as a damaged file, or a fault of matplotlib
        said = f"could not be drawn: {type(error).__name__}: {error}"
        print(f"trainkit | report: {said}", flush=True)


def throughput_of(folder: RunFolder) -> dict[str, Any] | None:
    """The throughput of a run as far as it is known, for `summary.json`."""
    try:
        return throughput(read(folder, STEP_TIMES, read_step_times))
    except (OSError, TrainkitError):  # the report names the damage
        return None


def _read_json(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return dict(found)


def _planned(plan: dict[str, Any], columns: dict[str, Line]) -> dict[str, Line]:
    """The planned rates of the columns that were logged."""
    steps = [step + 1.0 for step in plan.get("steps", ())]  # rows count from 1
    return {
        name + PLANNED: Line(
            name + PLANNED, steps, [float(y) for _, y in zip(steps, rate, strict=True)]
        )
        for name, rate in plan.get("rates", {}).items()
        if name in columns and rate
    }


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
