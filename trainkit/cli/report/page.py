"""`report.html`, which needs no script, no other file and no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from trainkit.cli.report.chart import STEP, Chart, Charts
from trainkit.cli.report.drawing import draw_all
from trainkit.cli.report.line import Line
from trainkit.pages.frame import framed
from trainkit.pages.look import number

_MOST, _OF_PAGE, _FEWEST = 1000, 48_000, 40
"""The most values that are drawn of a line and of all lines together, and the fewest of
a line: the page stays below 1 MB."""


def page(
    charts: Charts,
    *,
    title: str,
    where: str,
    table: str,
    pictures: Path | None = None,
) -> str:
    """The text of a page, whose charts are drawn.

    Args:
        charts: what it shows.
        title: its heading.
        where: the folder of the run or of the runs.
        table: the table on top, as HTML.
        pictures: a folder for the same charts as PNGs.
    """
    num_lines = sum(len(chart.lines) for chart in charts.shown)
    most = max(_FEWEST, min(_MOST, _OF_PAGE // num_lines))
    drawings = draw_all(charts.shown, most, pictures)
    figures = [
        _figure(chart, drawing, chart.notes(most))
        for chart, drawing in zip(charts.shown, drawings, strict=True)
    ]
    left_out = (
        f'<p class="left-out">Left out: {escape("; ".join(charts.left_out))}.</p>'
    )
    parts = [table, "<main>", *figures, "</main>"]
    parts += [left_out] * bool(charts.left_out)
    body = "\n".join([*parts, _numbers(charts.shown)])
    return framed(body, title=title, where=where)


def mark(colour: str, dash: str) -> str:
    """A short piece of a line, for legends."""
    style = f"border-top-color:var(--{colour});border-top-style:{dash}"
    return f'<i class="mark {colour}" style="{style}"></i>'


def _figure(chart: Chart, drawing: str, notes: Sequence[str]) -> str:
    legend = "".join(
        f"<span>{mark(line.colour, line.dash)}{escape(line.name)}"
        f"<b>{escape(chart.last(line))}</b></span>"
        for line in chart.lines
    )
    said = "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    return (
        f"<figure><h2>{escape(chart.title)}</h2>"
        f'<p class="says">{escape(chart.caption)}</p>'
        f'<p class="legend">{legend}</p>{drawing}{said}</figure>'
    )


def _numbers(charts: Sequence[Chart]) -> str:
    """A table of all lines in numbers."""
    heads = ("", "values", "first", "last", "least", "largest", "at steps")
    rows = ["".join(f'<th scope="col">{head}</th>' for head in heads)]
    rows += [_row(chart, line) for chart in charts for line in chart.lines]
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f"<details><summary>The lines in numbers</summary>"
        f'<div class="scroll"><table class="numbers">{body}</table></div></details>'
    )


def _row(chart: Chart, line: Line) -> str:
    steps, values = zip(*line.shown, strict=True)
    numbers = (values[0], values[-1], min(values), max(values))
    unit = "" if chart.over == STEP else f" {chart.over}"
    cells = [f"{len(values):,}", *map(chart.text, numbers)]
    cells.append(f"{number(steps[0])} to {number(steps[-1])}{unit}")
    texts = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<th scope="row">{escape(line.name)}</th>{texts}'
