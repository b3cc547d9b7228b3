"""Charts as figures: SVG for the page, and the same figures as PNGs."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.cli.report.charts import Chart
from trainkit.pages.look import LIGHT, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _FULL_WIDTH, _HEIGHT = 4.8, 9.86, 2.3
"""Inches of a chart, and of one over the full width of the page, which shows texts of 8
points in the size of its own."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.6, 0.2, 0.2, 0.42
"""Inches around what is drawn."""
_FEW = 40
"""A line of at most so many points has a dot at each."""
_WIDE = 30
"""An axis is logarithmic if the largest value is more than 30 times the least."""
_MARGIN = 0.06
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
_HEAD = re.compile(r'^.*?<svg [^>]*(viewBox="[^"]*")[^>]*>', re.DOTALL)
_NOT_NEEDED = re.compile(
    r""" id="[\w.]+_\d+"| xmlns:xlink="[^"]*"| transform="rotate\(-0 [^"]*"|"""
    r""" font-family: [^;"]*;|<g/>|\n *"""
)
_PLACES, _DIGITS = re.compile(r' d="[^"]*"'), re.compile(r"(\.\d)\d+")


def draw_all(charts: Sequence[Chart], pictures: Path | None = None) -> list[str]:
    """The drawing of each chart as HTML, and its PNG if there is a folder for them.

    The first chart is drawn over the full width, too.
    """
    names = [chart.key.casefold() for chart in charts]
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of overflowing spans, missing glyphs
        for place, chart in enumerate(charts):
            again = names[:place].count(names[place])  # by another case, or a sign
            name = chart.key + f"_{again + 1}" * bool(again)
            figure = figure_of(chart)
            found.append(_svg(figure, chart, name))
            if pictures is not None:
                _save(figure, chart, pictures / f"{name}.png")
        wide = _svg(figure_of(charts[0], _FULL_WIDTH), charts[0], "wide")
    found[0] = f'<div class="wide">{wide}</div><div class="narrow">{found[0]}</div>'
    return found


def figure_of(chart: Chart, width: float = _WIDTH) -> Figure:
    """A chart as a figure without title and legend; its width is in inches."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure = Figure((width, _HEIGHT), dpi=150)  # it needs no window
    across, up = width - _LEFT - _RIGHT, _HEIGHT - _BOTTOM - _TOP
    place = (_LEFT / width, _BOTTOM / _HEIGHT, across / width, up / _HEIGHT)
    panel = figure.add_axes(place)
    panel.patch.set_visible(False)  # the page has a colour of its own
    for line in chart.lines:
        steps, values, low, high = line.thinned()
        colour = LIGHT[line.colour]
        if len(low):
            see_through = 0.5 / (1 + len(chart.lines))  # bands lie on each other
            band = {"color": colour, "alpha": see_through, "linewidth": 0}
            panel.fill_between(steps, low, high, **band)
        panel.plot(
            steps,
            values,
            color=colour,
            linewidth=1.2,
            linestyle=line.dash,
            drawstyle="steps-post" if chart.as_stairs else "default",
            marker="o" if len(steps) <= _FEW else None,
            markersize=3,
        )
    whole = {"steps": [1, 2, 5, 10], "integer": True, "min_n_ticks": 1}
    panel.xaxis.set_major_locator(MaxNLocator(round(1.4 * width), **whole))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: number(x)))
    panel.margins(x=0.01)
    _set_values(panel, chart)
    panel.set_xlabel("step", loc="right", fontsize=8, color=LIGHT["quiet"])
    panel.tick_params(labelsize=8, colors=LIGHT["quiet"], left=False, bottom=False)
    panel.grid(axis="y", color=LIGHT["faint"], linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.spines["bottom"].set_color(LIGHT["quiet"])
    return figure


def _set_values(panel: Axes, chart: Chart) -> None:
    """Set the limits of the axis of values, and labels that do not meet."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    values = [value for line in chart.lines for _, value in line.shown]
    least, most = min(values), max(values)
    axis = panel.yaxis
    if not chart.from_zero and least > 0 and most / least > _WIDE:
        panel.set_yscale("log")
        panel.margins(y=_MARGIN)
        digits = (1, 2, 5) if most / least < 100 else (1,)
        axis.set_major_locator(LogLocator(subs=digits, numticks=6))
        axis.set_minor_locator(NullLocator())  # its labels, 6x10^-2, would meet
    else:
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        room = _MARGIN * (most - least) or 0.1 * abs(most) or 1.0
        is_floor = chart.from_zero and least >= 0
        panel.set_ylim(0.0 if is_floor else least - room, most + room)
    axis.set_major_formatter(FuncFormatter(lambda y, _: chart.text(y)))


def _svg(figure: Figure, chart: Chart, name: str) -> str:
    """The figure as SVG, in the colours of `LIGHT` by name and the font of the page.

    Its name tells it apart from the other drawings of the page.
    """
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        how = {"metadata": _NO_METADATA, "facecolor": "none"}
        figure.savefig(file, format="svg", **how)
    text = _NOT_NEEDED.sub("", file.getvalue())
    text = _PLACES.sub(lambda path: _DIGITS.sub(r"\1", path[0]), text)
    for colour, value in LIGHT.items():
        text = text.replace(value, f"var(--{colour})")
    head = f'role="img" aria-label="{escape(chart.caption)}"'
    return _HEAD.sub(lambda found: f"<svg {found[1]} {head}>", text)


def _save(figure: Figure, chart: Chart, png: Path) -> None:
    """Write the figure with its title, and its lines' names in their colours."""
    said = [(f"{x.name}  {chart.last(x)}", 7, x.colour) for x in chart.lines]
    up = 1.0
    for text, size, colour in reversed([(chart.title, 10, "ink"), *said]):
        style = {"fontsize": size, "color": LIGHT[colour], "parse_math": False}
        figure.text(_LEFT / _WIDTH, up, text, **style)
        up += 0.07
    png.parent.mkdir(exist_ok=True)
    # Strong compression takes as long as the drawing.
    figure.savefig(png, bbox_inches="tight", pil_kwargs={"compress_level": 1})
