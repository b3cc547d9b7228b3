"""`report.html`, which needs no other file and no network."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from trainkit.cli.report.chart import STEP, Chart, Charts
from trainkit.pages.frame import Row, framed, summary_table, text_of
from trainkit.pages.look import number

_HERE = Path(__file__).parent
_MOST = 300
"""The most stretches of steps of one line, as `Series.drawn` makes them."""
_OF_PAGE, _FEWEST = 12_000, 10
"""The most stretches of all lines together, and the fewest of one line: the page stays
below 1 MB."""

_BODY = """\
<!-- The charts are drawn by uPlot.
{library}
-->
{summary}
<noscript><style>.plot{{display:none}}</style>
<p class="note">The charts need scripts, which are switched off here. Their
numbers are at the end of this page, and the folder pictures of a run has them as PNGs,
unless pictures were switched off.</p></noscript>
<p class="hint" id="hint" hidden>Drag in a chart to zoom, double-click to zoom out,
click a name to hide its line. Arrow keys go from point to point.</p>
<main>
{figures}
</main>
{left_out}
{numbers}
<script id="points" type="application/json">{points}</script>"""


def page(
    charts: Charts,
    *,
    title: str,
    where: str,
    summary: Sequence[Row] = (),
    table: str = "",
) -> str:
    """The text of `report.html`.

    Args:
        charts: the charts of the run.
        title: the run's name.
        where: the run's folder.
        summary: the rows of the table on top.
        table: HTML in place of that table.
    """
    num_lines = sum(len(chart.lines) for chart in charts.shown)
    stretches = max(_FEWEST, min(_MOST, _OF_PAGE // num_lines))
    named = {f"chart{place}": chart for place, chart in enumerate(charts.shown)}
    points = {name: _data(chart, stretches) for name, chart in named.items()}
    figures = [_figure(chart, name, stretches) for name, chart in named.items()]
    body = _BODY.format(
        library=text_of(_HERE / "uplot/LICENSE"),
        summary=table or summary_table(summary),
        figures="\n".join(figures),
        left_out=_left_out(charts.left_out),
        numbers=_numbers(charts.shown),
        # Only < could end the script element.
        points=json.dumps(points, separators=(",", ":")).replace("<", "\\u003c"),
    )
    return framed(
        body,
        title=title,
        where=where,
        style=text_of(_HERE / "uplot/uPlot.min.css"),
        script=text_of(_HERE / "uplot/uPlot.iife.min.js") + text_of(_HERE / "page.js"),
    )


def _figure(chart: Chart, name: str, stretches: int) -> str:
    notes = "".join(
        f'<p class="note">{escape(note)}</p>' for note in chart.notes(stretches)
    )
    return (
        f"<figure><h2>{escape(chart.title)}</h2>"
        f'<p class="says">{escape(chart.caption)}</p>'
        f'<p id="{name}-says" hidden>{escape(chart.described())}</p>'
        f'<div class="plot" id="{name}" role="group" tabindex="0" '
        f'aria-label="{escape(chart.title)}" aria-describedby="{name}-says"></div>'
        f"{notes}</figure>"
    )


def _data(chart: Chart, stretches: int) -> dict[str, Any]:
    """A chart as `page.js` reads it."""
    return {
        "axes": chart.axes,
        "late": chart.late,
        "clipped": chart.clipped,
        "isShare": chart.is_share,
        "fromZero": chart.from_zero,
        "asStairs": chart.as_stairs,
        "over": chart.over,
        "lines": [
            {
                "label": line.label,
                "style": style,
                "dash": line.dash,
                "steps": [int(x) if x.is_integer() else x for x in drawn.steps],
                "values": _short(drawn.values),
                "low": _short(drawn.low),
                "high": _short(drawn.high),
                "alone": drawn.alone(),
            }
            for line, style, drawn in chart.drawn(stretches)
        ],
    }


def _short(values: Sequence[float]) -> list[float | None]:
    """The values in six digits; a gap is None."""
    return [float(f"{y:.6g}") if math.isfinite(y) else None for y in values]


def _left_out(reasons: Sequence[str]) -> str:
    if not reasons:
        return ""
    return f'<p class="left-out">Left out: {escape("; ".join(reasons))}.</p>'


def _numbers(charts: Sequence[Chart]) -> str:
    """A table of all lines in numbers."""
    heads = ("", "values", "first", "last", "least", "largest", "at steps")
    rows = ["".join(f'<th scope="col">{head}</th>' for head in heads)]
    for chart in charts:
        for line in chart.lines:
            shown = line.series.shown
            values = [value for _, value in shown]
            numbers = (values[0], values[-1], min(values), max(values))
            cells = [f"{len(shown):,}", *map(chart.text, numbers)]
            unit = "" if chart.over == STEP else f" {chart.over}"
            cells.append(f"{number(shown[0][0])} to {number(shown[-1][0])}{unit}")
            texts = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            rows.append(f'<th scope="row">{escape(line.label)}</th>{texts}')
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f"<details><summary>The lines in numbers</summary>"
        f'<div class="scroll"><table class="numbers">{body}</table></div></details>'
    )
