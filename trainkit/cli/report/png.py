"""The charts as PNGs, for papers and READMEs."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.cli.report.chart import Chart, Charts
from trainkit.cli.report.charts import KEYS, METRIC
from trainkit.pages.look import (
    LIGHT,
    label_decades,
    limits,
    new_figure,
    number,
    tidy,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STRETCHES = 300
_FEW = 40
"""A line of at most so many points has a dot at each."""
_NEAR = 0.09
"""The share of the axis that two ticks are apart at least."""
_SPACING = {"left": 0.12, "right": 0.955, "top": 0.82, "bottom": 0.14}


def draw_all(charts: Charts, folder: Path) -> list[Path]:
    """Write a PNG for each chart, and remove PNGs of charts that are gone.

    Other files in the folder stay.

    Raises:
        ImportError: matplotlib is not installed.
    """
    written = []
    for chart, name in zip(charts.shown, _names(charts), strict=True):
        path = folder / f"{name}.png"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of overflowing spans, missing glyphs
            figure = draw(chart)
            folder.mkdir(exist_ok=True)
            figure.savefig(path)
        written.append(path)
    for path in set(folder.glob("*.png")) - set(written):
        if path.stem in KEYS or path.stem.startswith(METRIC):
            path.unlink()
    return written


def _names(charts: Charts) -> list[str]:
    """The charts' keys, numbered if they differ in nothing but upper and lower case."""
    names: list[str] = []
    for chart in charts.shown:
        name, number = chart.key, 1
        while name.casefold() in {each.casefold() for each in names}:
            number += 1
            name = f"{chart.key}_{number}"
        names.append(name)
    return names


def draw(chart: Chart) -> Figure:
    """A chart as a figure."""
    figure = new_figure(6.4, 3.2)
    figure.subplots_adjust(**_SPACING)
    panel = figure.add_subplot()
    _draw_lines(panel, chart)
    _draw_axes(panel, chart)
    panel.set_title(chart.title, loc="left", fontsize=11, pad=22, parse_math=False)
    legend = panel.legend(
        panel.lines,
        ["."] * len(chart.lines),
        loc="lower left",
        bbox_to_anchor=(-0.012, 1.0),
        ncols=4,
        frameon=False,
        fontsize=8,
        borderaxespad=0.2,
    )
    for text, line in zip(legend.get_texts(), chart.lines, strict=True):
        text.set(text=line.label, parse_math=False)  # may begin with _
    return figure


def _draw_lines(panel: Axes, chart: Chart) -> None:
    for line, style, drawn in chart.drawn(_STRETCHES):
        colour, is_plan = LIGHT[style], style == "plan"
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
        dots = range(len(drawn.steps)) if has_dots else drawn.alone()
        panel.plot(
            drawn.steps,
            drawn.values,
            color=colour,
            linewidth=4.0 if is_plan else 1.2,
            alpha=0.45 if is_plan else None,
            linestyle="--" if line.dash else "-",
            drawstyle="steps-post" if chart.as_stairs else "default",
            marker="o" if dots else None,
            markersize=3,
            markevery=list(dots),
        )


def _draw_axes(panel: Axes, chart: Chart) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    if chart.is_log:
        panel.set_yscale("log")
    low, high = chart.range
    if chart.axes[0] == "late":
        high = chart.late[1]
        quiet = {"fontsize": 8, "pad": 3, "color": LIGHT["quiet"]}
        panel.set_title(chart.clipped, loc="right", **quiet)
    panel.set_ylim(*limits(low, high, is_log=chart.is_log, from_zero=chart.from_zero))
    panel.minorticks_off()
    if chart.is_log:
        label_decades(panel.yaxis)
    else:
        panel.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: chart.text(y)))
    shown = [step for line in chart.lines for step, _ in line.series.shown]
    steps = min(shown), max(shown)
    whole = MaxNLocator(7, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)
    panel.xaxis.set_ticks(_with_last(whole.tick_values(*steps), *steps))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: number(x)))
    panel.margins(x=0.01)
    panel.set_xlabel(chart.over, fontsize=8, loc="right")
    panel.tick_params(labelsize=8, colors=LIGHT["quiet"], length=0)
    tidy(panel, grid="y")
    panel.spines["left"].set_visible(False)


def _with_last(ticks: Iterable[float], first: float, last: float) -> list[float]:
    """The ticks and the last step, which takes the place of any too near to it.

    >>> _with_last([0, 50, 100, 150, 200], 3, 155)
    [50, 100, 155]
    """
    near = _NEAR * (last - first)
    kept = [tick for tick in ticks if first <= tick and last - tick >= near]
    return [tick for tick in kept if tick < last] + [last]
