"""From a run's folder to its report."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainkit.cli.report.chart import Charts
from trainkit.cli.report.charts import choose
from trainkit.cli.report.page import page
from trainkit.cli.report.series import Series, read_series
from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.runs.summary_rows import Row, rows
from trainkit.core.effective import EffectiveBatch
from trainkit.core.rate_plan import RatePlan
from trainkit.errors import TrainkitError
from trainkit.lit.logs.metric_file import read_rows

_SHOWN = {"status", "steps", "windows", "metrics", "micro_batching", "versions"}
_SHOWN |= {"learning_rates", "plain_accumulation"}
"""What a summary must have, to be shown."""


@dataclass(frozen=True)
class Report:
    """What was written.

    Attributes:
        num_charts: how many there are.
        num_pictures: how many PNGs.
        why_no_pictures: why there are none.
    """

    num_charts: int
    num_pictures: int
    why_no_pictures: str = ""


def write_report(folder: RunFolder, *, pictures: bool = True) -> Report | None:
    """Write `report.html` and, beside it, `pictures/`.

    Args:
        folder: of a run that has ended, or is under way.
        pictures: whether to draw the PNGs.

    Returns:
        None where there is no row with a number yet, and nothing to draw.

    Raises:
        TrainkitError: a file of the folder is damaged.
    """
    charts = read_charts(folder)
    if not charts.shown:
        return None
    facts = _summary(folder)
    text = page(
        charts,
        title=str(facts.get("name") or folder.path.name),
        where=str(folder.path),
        summary=summary_rows(facts, charts),
    )
    folder.write_report(text)
    if not pictures:
        return Report(len(charts.shown), 0)
    try:
        from trainkit.cli.report.png import draw_all

        drawn = draw_all(charts, folder.path / folder.PICTURES)
    except ImportError as error:
        why = f"no PNGs, for which matplotlib is needed ({error})"
        return Report(len(charts.shown), 0, why)
    return Report(len(charts.shown), len(drawn))


def report_of_training(folder: RunFolder, *, pictures: bool) -> None:
    """The report of a training that has ended in this process, however it ended.

    A failure is printed in one line: a training never fails because of its report.
    """
    try:
        report = write_report(folder, pictures=pictures)
        said = report.why_no_pictures if report else ""
    except Exception as error:  # whatever stands in the folder, or matplotlib does
        said = f"could not be drawn: {type(error).__name__}: {error}"
    if said:
        print(f"trainkit | report: {said}", flush=True)


def read_charts(folder: RunFolder) -> Charts:
    """The charts of a run, from `metrics.csv` and the plan beside it."""
    try:
        found = read_series(read_rows(folder.path / folder.METRICS))
    except (csv.Error, UnicodeDecodeError) as error:
        raise TrainkitError(
            f"{folder.path / folder.METRICS}: must be a table of numbers in UTF-8, "
            f"and is damaged: {error}. Mend it or remove it."
        ) from error
    plan = RatePlan.of_json(folder.read_rate_plan())
    steps = tuple(map(float, plan.steps))
    planned = {
        name: Series(name, steps, tuple(rates))
        for name, rates in plan.rates.items()
        if rates
    }
    return choose(found, planned, why_no_plan=plan.why_not)


def summary_rows(facts: dict[str, Any], charts: Charts) -> list[Row]:
    """The table on top. A run that was killed has no summary, and one that goes on has
    that of its first part: then the charts say more than it does."""
    last = max(
        step
        for chart in charts.shown
        for line in chart.lines
        if line.role != "plan"
        for step, _ in line.series.shown
    )
    if not facts:
        said = f"has not ended, or was killed; its last row is of step {last:,.0f}"
        return [("training", said)]
    found = rows(facts)
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


def _origin(facts: dict[str, Any]) -> Sequence[Row]:
    versions = [f"{name} {number}" for name, number in facts["versions"].items()]
    found = [("versions", ", ".join(versions))]
    if facts.get("git_commit"):
        found.append(("commit", facts["git_commit"]))
    return found


def _summary(folder: RunFolder) -> dict[str, Any]:
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
