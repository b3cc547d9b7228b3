"""`report.html`: one file that needs no other, and no network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from trainkit.cli.report import look
from trainkit.cli.report.charts import Chart, Charts
from trainkit.cli.report.svg import Drawn, draw, styles, value_text
from trainkit.cli.report.ticks import number

Row = tuple[str, str]

_WIDE, _NARROW = 1150, 560
# Whatever a metric or a run is called, the page fetches nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<header><h1>{title}</h1><button id="theme" type="button" hidden>Dark</button></header>
<p class="where">{where}</p>
<table class="summary">{summary}</table>
<main>
{figures}
</main>
{left_out}
{numbers}
<script id="points" type="application/json">{points}</script>
<script>
{script}</script>
</body>
</html>
"""


def page(charts: Charts, *, title: str, where: str, summary: Sequence[Row]) -> str:
    """The whole page.

    Args:
        charts: of the run.
        title: its name.
        where: its folder.
        summary: what stands in the table on top.
    """
    figures = []
    points: dict[str, Any] = {}
    for place, chart in enumerate(charts.shown):
        name = f"chart{place}"
        is_wide = place == 0
        drawn = draw(chart, name, width=_WIDE if is_wide else _NARROW)
        figures.append(_figure(chart, drawn, name, is_wide=is_wide))
        points[name] = drawn.points
    return _PAGE.format(
        policy=_POLICY,
        style=look.STYLE,
        script=look.SCRIPT,
        title=escape(title),
        where=escape(where),
        summary=_summary(summary),
        figures="\n".join(figures),
        left_out=_left_out(charts.left_out),
        numbers=_numbers(charts.shown),
        # In a script, only < could end it.
        points=json.dumps(points, separators=(",", ":")).replace("<", "\\u003c"),
    )


def _figure(chart: Chart, drawn: Drawn, name: str, *, is_wide: bool) -> str:
    legend = "".join(
        f'<span><i class="{style}"></i>{escape(line.label)}</span>'
        for line, style in zip(chart.lines, styles(chart), strict=True)
    )
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in drawn.notes)
    return (
        f'<figure id="{name}"{" class=wide" * is_wide}>'
        f"<h2>{escape(chart.title)}</h2>"
        f'<p class="says">{escape(chart.says)}</p>'
        f'<div class="legend">{legend}</div><div class="plot">'
        f'{drawn.svg}<div class="tip" hidden></div></div>{notes}</figure>'
    )


def _summary(rows: Sequence[Row]) -> str:
    return "".join(
        f'<tr><th scope="row">{escape(label)}</th><td>{escape(text)}</td></tr>'
        for label, text in rows
    )


def _left_out(reasons: Sequence[str]) -> str:
    if not reasons:
        return ""
    return f'<p class="left-out">Left out: {escape("; ".join(reasons))}.</p>'


def _numbers(charts: Sequence[Chart]) -> str:
    """What the lines are, for those who want numbers."""
    heads = ("", "values", "first", "last", "least", "largest", "at steps")
    rows = ["".join(f'<th scope="col">{head}</th>' for head in heads)]
    for chart in charts:
        for line in chart.lines:
            shown = line.series.shown
            values = [value for _, value in shown]
            cells = [f"{len(shown):,}"] + [
                value_text(value, is_share=chart.is_share)
                for value in (values[0], values[-1], min(values), max(values))
            ]
            cells.append(f"{number(shown[0][0])} to {number(shown[-1][0])}")
            texts = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            rows.append(f'<th scope="row">{escape(line.label)}</th>{texts}')
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f"<details><summary>The lines in numbers</summary>"
        f'<div class="scroll"><table>{body}</table></div></details>'
    )
