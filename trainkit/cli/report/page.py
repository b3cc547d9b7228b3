"""`report.html` of a run, and the page of several; neither needs script or network."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

import yaml

from trainkit.cli.report.charts import (
    METRIC,
    MOST,
    Chart,
    Line,
    choose,
    read_lines,
)
from trainkit.cli.report.drawing import draw_all
from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.sweep.whole_config import flatten
from trainkit.lit.logs.metric_file import read_rows
from trainkit.pages.look import framed, number, table

_COLOURS = ("train", "validation", "other1", "other2", "other3", "other4")
_DASHES = ("solid", "dashed", "dotted")
_LONGEST = 40
"""The longest text of values in a legend."""
_NONE = "–"
_LONG = (
    f"Of a line with more than {MOST:,} values, each stretch of steps is drawn as its "
    f"mean, in a band from its least to its largest."
)
_HEADS = ["", "values", "not finite", "first", "last", "least", "largest", "steps"]


# ---- what the folder of a run tells --------------------------------------------------


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
    rows: list[tuple[str, str]]


def read_run(folder: RunFolder) -> Run:
    """Read the folder of a run.

    Raises:
        TrainkitError: a file of it is damaged.
    """
    columns = folder.read(folder.METRICS, lambda path: read_lines(read_rows(path)))
    facts = folder.read_summary()
    last = max((line.shown[-1][0] for line in columns.values()), default=0.0)
    charts, left_out = choose(columns, unit=facts.get("unit", ""))
    if facts:
        found = folder.read(
            folder.SUMMARY, lambda _: [(k, v) for k, v in facts["table"]]
        )
        if last > facts["steps"]:
            found.insert(1, ("since then", f"resumed, up to step {last:,.0f}"))
    else:  # it was killed, or is under way
        said = f"has not ended, or was killed; its last row is of step {last:,.0f}"
        lines = [(chart, line) for chart in charts for line in chart.lines]
        ends = [(x.name, c.last(x)) for c, x in lines if x.colour == "validation"]
        found = [("training", said), *ends]
    name = str(facts.get("name") or folder.path.name)
    return Run(folder, name, charts, left_out, found)


def _config(folder: RunFolder) -> dict[str, str]:
    """The configuration by dotted keys, with RUN_DIR for the run's own folder."""

    def texts(path: Path) -> dict[str, str]:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        config = dict(yaml.safe_load(text) or {})
        own = str((config.pop("paths", None) or {}).get("run_dir") or folder.path)
        said = {
            key: each if isinstance(each, str) else json.dumps(each, default=str)
            for key, each in flatten(config).items()
        }
        return {key: each.replace(own, "RUN_DIR") for key, each in said.items()}

    return folder.read(folder.CONFIG, texts)


# ---- the pages -----------------------------------------------------------------------


def write_report(run: Run, *, pictures: bool = True) -> None:
    """Write `report.html` of a run that has charts and, beside it, `pictures/`."""
    folder = run.folder
    place = folder.path / folder.PICTURES if pictures else None
    parts = _parts(run.charts, table(run.rows), run.left_out, place)
    where = str(folder.path)
    folder.write(folder.REPORT, framed(parts, title=run.name, where=where))


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


def comparison(runs: Sequence[Run], *, left_out: Sequence[str]) -> str:
    """The page of several runs: a line for each, and a table of what differs."""
    where = os.path.commonpath([run.folder.path for run in runs])
    names = [os.path.relpath(run.folder.path, where) for run in runs]
    configs = [_config(run.folder) for run in runs]
    ends = [dict(run.rows) for run in runs]
    differing = _differing(configs)
    lines = [["", *names]]
    for texts, keys in (configs, differing), (ends, ["training", *_differing(ends)]):
        for key in dict.fromkeys(keys):
            lines.append([key, *(of.get(key, _NONE) for of in texts)])
    said = f"Values of their configurations that differ: {len(differing)}"
    top = f"<details open><summary>{said}</summary>{table(lines, 'runs')}</details>"
    labels = [_label(*of, differing) for of in zip(names, configs, strict=True)]
    parts = _parts(_together(runs, labels), top, left_out)
    return framed(parts, title=f"{len(runs)} runs", where=where)


def _differing(found: Sequence[Mapping[str, str]]) -> list[str]:
    """The keys under which not all have the same text."""
    keys = dict.fromkeys(key for each in found for key in each)
    return [key for key in keys if len({each.get(key) for each in found}) > 1]


def _label(name: str, config: Mapping[str, str], differing: Sequence[str]) -> str:
    """A run's name, with what differs if that is short."""
    parts = [f"{key.rpartition('.')[2]}={config.get(key, _NONE)}" for key in differing]
    said = ", ".join(parts)
    return f"{name}: {said}" if 0 < len(said) <= _LONGEST else name


def _together(runs: Sequence[Run], labels: Sequence[str]) -> list[Chart]:
    """A chart for each column, with a line for each run; a title has its unit."""
    found: dict[tuple[str, str], tuple[Chart, list[Line]]] = {}
    for place, (run, label) in enumerate(zip(runs, labels, strict=True)):
        turn, colour = divmod(place, len(_COLOURS))
        look = {"colour": _COLOURS[colour], "dash": _DASHES[turn % len(_DASHES)]}
        for chart in run.charts:
            for line in chart.lines:
                is_other = chart.key.startswith(METRIC)
                key = (line.name if is_other else chart.title, line.name)
                _, lines = found.setdefault(key, (chart, []))
                lines.append(replace(line, name=label, **look))
    titles = [title for title, _ in found]
    return [
        replace(
            chart,
            title=title if titles.count(title) == 1 else f"{title}: {name}",
            lines=lines,
        )
        for (title, name), (chart, lines) in found.items()
    ]


def _parts(
    charts: Sequence[Chart],
    top: str,
    left_out: Sequence[str],
    pictures: Path | None = None,
) -> str:
    """What stands below the heading: the table on top, the charts, and the numbers."""
    figures = map(_figure, charts, draw_all(charts, pictures))
    said = [f"Left out: {escape('; '.join(left_out))}."] if left_out else []
    notes = [f'<p class="left-out">{each}</p>' for each in (*said, _LONG)]
    numbers = [_HEADS, *(_numbers(chart, x) for chart in charts for x in chart.lines)]
    last = f"<summary>The lines in numbers</summary>{table(numbers, 'numbers')}"
    main = ("<main>", *figures, "</main>")
    return "\n".join([top, *main, *notes, f"<details>{last}</details>"])


def _figure(chart: Chart, drawing: str) -> str:
    legend = "".join(
        f'<span><i class="mark" style="border-top:2px {line.dash} '
        f'var(--{line.colour})"></i>{escape(line.name)}'
        f"<b>{escape(chart.last(line))}</b></span>"
        for line in chart.lines
    )
    return (
        f"<figure><h2>{escape(chart.title)}</h2>"
        f'<p class="says">{escape(chart.caption)}</p>'
        f'<p class="legend">{legend}</p>{drawing}</figure>'
    )


def _numbers(chart: Chart, line: Line) -> list[str]:
    """The row of a line, below `_HEADS`."""
    steps, values = zip(*line.shown, strict=True)
    texts = map(chart.text, (values[0], values[-1], min(values), max(values)))
    counts = [len(values), len(line.values) - len(values)]
    span = f"{number(steps[0])} to {number(steps[-1])}"
    return [line.name, *(f"{count:,}" for count in counts), *texts, span]
