"""`report.html` and its pictures; the page needs no script, file or network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from trainkit.cli.report.charts import Chart
from trainkit.cli.report.drawing import draw_all
from trainkit.cli.report.lines import MOST, Line
from trainkit.cli.report.run import Run, read_run
from trainkit.cli.runs.folder import RunFolder
from trainkit.pages.frame import framed, table
from trainkit.pages.look import number

_LONG = (
    f"Of a line with more than {MOST:,} values, each stretch of steps is drawn as its "
    f"mean, in a band from its least to its largest."
)


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


def page(
    charts: Sequence[Chart],
    *,
    title: str,
    where: str,
    top: str,
    left_out: Sequence[str] = (),
    pictures: Path | None = None,
) -> str:
    """The text of a page, whose charts are drawn.

    Args:
        charts: what it shows.
        title: its heading.
        where: the folder of the run or of the runs.
        top: the table on top, as HTML.
        left_out: what it does not show.
        pictures: a folder for the same charts as PNGs.
    """
    drawings = draw_all(charts, pictures)
    parts = [top, "<main>", *map(_figure, charts, drawings), "</main>"]
    if left_out:
        said = escape("; ".join(left_out))
        parts.append(f'<p class="left-out">Left out: {said}.</p>')
    parts.append(f'<p class="left-out">{_LONG}</p>')
    heads = ["", "values", "not finite", "first", "last", "least", "largest", "steps"]
    rows = [heads, *(_row(chart, line) for chart in charts for line in chart.lines)]
    numbers = table(rows, "numbers")
    parts.append(f"<details><summary>The lines in numbers</summary>{numbers}</details>")
    return framed("\n".join(parts), title=title, where=where)


def _figure(chart: Chart, drawing: str) -> str:
    legend = "".join(
        f'<span><i class="mark {line.colour}" style="border-top-color:'
        f'var(--{line.colour});border-top-style:{line.dash}"></i>{escape(line.name)}'
        f"<b>{escape(chart.last(line))}</b></span>"
        for line in chart.lines
    )
    return (
        f"<figure><h2>{escape(chart.title)}</h2>"
        f'<p class="says">{escape(chart.caption)}</p>'
        f'<p class="legend">{legend}</p>{drawing}'
        f'<p class="note">{escape(chart.note)}</p></figure>'
    )


def _row(chart: Chart, line: Line) -> list[str]:
    steps, values = zip(*line.shown, strict=True)
    texts = map(chart.text, (values[0], values[-1], min(values), max(values)))
    counts = [len(values), len(line.values) - len(values)]
    span = f"{number(steps[0])} to {number(steps[-1])}"
    return [line.name, *(f"{count:,}" for count in counts), *texts, span]
