"""The same charts as PNGs, for papers and READMEs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.cli.report.charts import KEYS, METRIC, Chart, Charts
from trainkit.cli.report.look import LIGHT
from trainkit.cli.report.svg import first_and_last, has_band, styles
from trainkit.cli.report.ticks import Scale, labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STRETCHES = 400
_FEW = 40
_INCHES = (6.4, 3.2)


def draw_all(charts: Charts, folder: Path) -> list[Path]:
    """Write a PNG for each chart, and remove those of charts that are no more. What
    somebody else has put there stays.

    Raises:
        ImportError: matplotlib is not there.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder.mkdir(exist_ok=True)
    written = []
    for chart, name in zip(charts.shown, _names(charts), strict=True):
        figure = Figure(figsize=_INCHES, dpi=150)
        FigureCanvasAgg(figure)
        figure.subplots_adjust(left=0.12, right=0.97, top=0.82, bottom=0.14)
        path = folder / f"{name}.png"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of spans that overflow, missing glyphs
            _draw(figure.add_subplot(), chart)
            figure.savefig(path)
        written.append(path)
    for path in set(folder.glob("*.png")) - set(written):
        if path.stem in KEYS or path.stem.startswith(METRIC):
            path.unlink()
    return written


def _names(charts: Charts) -> list[str]:
    """The keys, numbered where a file system may take them for the same."""
    names: list[str] = []
    for chart in charts.shown:
        name, number = chart.key, 1
        while name.casefold() in {each.casefold() for each in names}:
            number += 1
            name = f"{chart.key}_{number}"
        names.append(name)
    return names


def _draw(panel: Axes, chart: Chart) -> None:
    for line, style in zip(chart.lines, styles(chart), strict=True):
        series = line.series.thinned(_STRETCHES)
        if has_band(chart, line, _STRETCHES):
            panel.plot(
                series.steps,
                series.values,
                color=LIGHT[style],
                linewidth=0.8,
                alpha=0.3,
            )
            series = line.series.means(_STRETCHES // 2)
        is_dotted = len(series.steps) <= _FEW and style != "plan"
        panel.plot(
            series.steps,
            series.values,
            color=LIGHT[style],
            linewidth=4.0 if style == "plan" else 1.2,
            alpha=0.45 if style == "plan" else None,
            linestyle="--" if line.role == "other" else "-",
            drawstyle="steps-post" if chart.as_stairs else "default",
            marker="o" if is_dotted else None,
            markersize=3,
            label=line.label,
        )
    _axes(panel, chart)
    panel.set_title(chart.title, loc="left", fontsize=11, pad=22)
    panel.legend(
        loc="lower left",
        bbox_to_anchor=(-0.012, 1.0),
        ncols=4,
        frameon=False,
        fontsize=8,
        borderaxespad=0.2,
    )


def _axes(panel: Axes, chart: Chart) -> None:
    """With the very ticks of the page."""
    shown = [point for line in chart.lines for point in line.series.shown]
    values = (value for _, value in shown)
    y = Scale.over(values, from_zero=chart.from_zero, may_be_log=chart.may_be_log)
    x = Scale.over((step for step, _ in shown), pad=0.01)
    if y.is_log:
        panel.set_yscale("log")
    panel.minorticks_off()
    panel.set_yticks(y.ticks(), labels(y.ticks(), percent=chart.is_share))
    whole = x.whole_ticks(*first_and_last(chart), most=7)
    panel.set_xticks(whole, labels(whole))
    panel.set_xlim(x.low, x.high)
    panel.set_ylim(y.low, y.high)
    panel.set_xlabel("step", fontsize=8, loc="right")
    panel.tick_params(labelsize=8, colors=LIGHT["quiet"], length=0)
    panel.grid(axis="y", color=LIGHT["faint"], linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right", "left"]].set_visible(False)
