"""Charts as figures: SVG for the page, and the same figures as PNGs."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.cli.report.chart import Chart
from trainkit.cli.report.charts import KEYS, METRIC
from trainkit.cli.report.line import Line
from trainkit.pages.look import LIGHT, label_decades, limits, new_figure, number, tidy
from trainkit.pages.svg import inline_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _FULL_WIDTH, _HEIGHT = 4.8, 9.86, 2.3
"""Inches: of a chart, of one over the full width of the page, and of both without their
heads. The page shows texts of 8 points in the size of its own."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.6, 0.2, 0.2, 0.42
"""Inches around what is drawn."""
_TITLE, _ROW = 0.3, 0.17
"""Inches of a PNG's title and of each line of its legend."""
_PNG: dict[str, Any] = {"dpi": 180, "pil_kwargs": {"compress_level": 3}}
"""Dots per inch, and a compression that is quick: a training waits for its pictures."""
_FEW = 40
"""A line of at most so many points has a dot at each."""
_NEAR = 0.15
"""The share of the axis that two ticks are apart at least."""


def draw_all(charts: Sequence[Chart], most: int, pictures: Path | None) -> list[str]:
    """The drawing of each chart as HTML; the first one also over the full width.

    Args:
        charts: what is drawn.
        most: how many values of a line are drawn.
        pictures: a folder for the PNGs. It loses the PNGs of charts that are gone;
            other files stay.
    """
    names = _names(charts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of overflowing spans, missing glyphs
        figures = [draw(chart, most) for chart in charts]
        found = list(map(_svg, figures, charts, names))
        wide = _svg(draw(charts[0], most, _FULL_WIDTH), charts[0], f"{names[0]}, wide")
        found[0] = f'<div class="wide">{wide}</div><div class="narrow">{found[0]}</div>'
        if pictures is not None:
            pictures.mkdir(exist_ok=True)
            for figure, chart, name in zip(figures, charts, names, strict=True):
                _add_head(figure, chart)
                figure.savefig(pictures / f"{name}.png", **_PNG)
            for path in pictures.glob("*.png"):
                is_ours = path.stem in KEYS or path.stem.startswith(METRIC)
                if is_ours and path.stem not in names:
                    path.unlink()
    return found


def _names(charts: Iterable[Chart]) -> list[str]:
    """The charts' keys, numbered if they differ in nothing but upper and lower case."""
    names: list[str] = []
    for chart in charts:
        name, number = chart.key, 1
        while name.casefold() in {each.casefold() for each in names}:
            number += 1
            name = f"{chart.key}_{number}"
        names.append(name)
    return names


def draw(chart: Chart, most: int, width: float = _WIDTH) -> Figure:
    """A chart as a figure, with room for its head."""
    height = _HEIGHT + _TITLE + len(chart.lines) * _ROW
    figure = new_figure(width, height)
    across, up = width - _LEFT - _RIGHT, _HEIGHT - _BOTTOM - _TOP
    place = (_LEFT / width, _BOTTOM / height, across / width, up / height)
    panel = figure.add_axes(place)
    panel.patch.set_visible(False)  # the page has a colour of its own
    for line in chart.lines:
        _draw_line(panel, chart, line, most)
    _draw_axes(panel, chart, most_ticks=round(1.4 * width))
    return figure


def _draw_line(panel: Axes, chart: Chart, line: Line, most: int) -> None:
    drawn = chart.drawn(line, most)
    colour, is_plan = LIGHT[line.colour], line.colour == "plan"
    if drawn.low:
        panel.fill_between(
            drawn.steps,
            drawn.low,
            drawn.high,
            color=colour,
            alpha=0.25,
            linewidth=0,
            step="post" if chart.as_stairs else None,
        )
    has_dots = len(drawn.steps) <= _FEW and not is_plan
    dots = range(len(drawn.steps)) if has_dots else drawn.alone
    panel.plot(
        drawn.steps,
        drawn.values,
        color=colour,
        linewidth=4.0 if is_plan else 1.2,
        alpha=0.45 if is_plan else None,
        linestyle=line.dash,
        drawstyle="steps-post" if chart.as_stairs else "default",
        marker="o" if dots else None,
        markersize=3,
        markevery=list(dots),
    )


def _draw_axes(panel: Axes, chart: Chart, *, most_ticks: int) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

    low, high = chart.range
    is_log = chart.axis == "log"
    if chart.axis == "late":
        high = chart.late[1]
    panel.set_yscale("log" if is_log else "linear")
    panel.set_ylim(*limits(low, high, is_log=is_log, from_zero=chart.from_zero))
    if is_log:
        label_decades(panel.yaxis)
    else:
        panel.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: chart.text(y)))
    shown = [step for line in chart.lines for step, _ in line.shown]
    steps = min(shown), max(shown)
    whole = MaxNLocator(most_ticks, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)
    ticks = _with_last(whole.tick_values(*steps), *steps)
    panel.xaxis.set_major_locator(FixedLocator(ticks))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: number(x)))
    panel.margins(x=0.01)
    quiet = {"fontsize": 8, "color": LIGHT["quiet"]}
    panel.set_xlabel(chart.over, loc="right", **quiet)
    panel.set_title(chart.clipped, loc="right", pad=4, **quiet)
    panel.tick_params(labelsize=8, colors=LIGHT["quiet"], left=False, bottom=False)
    tidy(panel, grid="y")
    panel.spines["left"].set_visible(False)
    panel.spines["bottom"].set_color(LIGHT["quiet"])


def _with_last(ticks: Iterable[float], first: float, last: float) -> list[float]:
    """The ticks and the last step, which takes the place of any too near to it.

    >>> _with_last([0, 50, 100, 150, 200], 3, 155)
    [50, 100, 155]
    """
    near = _NEAR * (last - first)
    kept = [tick for tick in ticks if first <= tick and last - tick >= near]
    return [tick for tick in kept if tick < last] + [last]


def _svg(figure: Figure, chart: Chart, name: str) -> str:
    from matplotlib.transforms import Bbox

    box = Bbox([[0, 0], [figure.get_figwidth(), _HEIGHT]])
    return inline_svg(figure, name=name, said=chart.caption, bbox_inches=box)


def _add_head(figure: Figure, chart: Chart) -> None:
    """Add the title, and the names of the lines in their colours."""
    left, up = _LEFT / figure.get_figwidth(), 1 / figure.get_figheight()
    figure.text(
        left, 1 - 0.08 * up, chart.title, va="top", fontsize=10, parse_math=False
    )
    for place, line in enumerate(chart.lines):
        figure.text(
            left,
            1 - (_TITLE + place * _ROW) * up,
            f"{line.name}  {chart.last(line)}",
            va="top",
            fontsize=7,
            color=LIGHT[line.colour],
            parse_math=False,
        )
