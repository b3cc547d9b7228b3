"""A picture of a sweep: its metric over each swept parameter, and the best so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.cli.sweep.sweep_file import SweepFile
from trainkit.cli.sweep.table import brief
from trainkit.cli.sweep.trial import Trial, best_of, is_number
from trainkit.pages.look import LIGHT, is_wide, label_decades, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES = {"finished": (LIGHT["train"], "o"), "stopped": ("#e69f00", "s")}
_MOST_PANELS = 12
_MOST_TICKS = 8


def draw(sweep: SweepFile, trials: Sequence[Trial], path: Path) -> Path:
    """Write a picture of the trials that have a number as a PNG.

    A trial that was stopped early is a square, and the best trial has a ring. A
    parameter with a list of values has them at equal distances.
    """
    from matplotlib.figure import Figure

    names = ["trial", *sweep.varied][:_MOST_PANELS]
    columns = 2 if len(names) == 4 else min(3, len(names))
    rows = math.ceil(len(names) / columns)
    size = (4.4 * columns, 3.4 * rows)
    figure = Figure(size, dpi=150, layout="constrained")  # it needs no window
    for place, name in enumerate(names, 1):
        panel = figure.add_subplot(rows, columns, place, xlabel=name)
        draw_axis = _draw_order if place == 1 else _draw_parameter
        _scatter(panel, sweep, trials, draw_axis(panel, sweep, trials))
        panel.set_ylabel(sweep.metric_name or "metric")
        tidy(panel)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    states = [trial.state for trial in trials]
    counts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    title = f"{sweep.name or sweep.path.stem}: {sweep.method}, {', '.join(counts)}"
    figure.suptitle(title)
    figure.savefig(path)
    return path


def _draw_order(
    panel: Axes, sweep: SweepFile, trials: Sequence[Trial]
) -> Sequence[Any]:
    """Draw the best until each trial; returns the places of the trials, in order."""
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    order = range(len(trials))  # as their names are numbered
    finished = [t.number if t.state == "finished" else None for t in trials]
    better = np.fmax if sweep.maximizes else np.fmin  # which pass over NaN
    best = better.accumulate(np.array(finished, dtype=float))
    panel.step(order, best, where="post", color="0.4", lw=1.2, label="best so far")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    return order


def _draw_parameter(
    panel: Axes, sweep: SweepFile, trials: Sequence[Trial]
) -> Sequence[Any]:
    """Make the axis of a parameter; returns the places of the trials on it."""
    name = panel.get_xlabel()
    parameter = sweep.varied[name]
    values: list[Any] = [trial.flat.get(name) for trial in trials]
    if not parameter.values and all(map(is_number, values)):
        if "log" in parameter.kind and min(values, default=0) > 0:
            panel.set_xscale("log")
        return values
    texts = list(dict.fromkeys(map(brief, [*parameter.values, *values])))
    step = math.ceil(len(texts) / _MOST_TICKS)
    panel.set_xticks(range(0, len(texts), step), texts[::step])
    panel.set_xlim(-0.5, len(texts) - 0.5)
    return [texts.index(brief(value)) for value in values]


def _scatter(
    panel: Axes, sweep: SweepFile, trials: Sequence[Trial], places: Sequence[Any]
) -> None:
    """Draw each trial at its place."""
    placed = dict(zip((trial.name for trial in trials), places, strict=True))
    drawn = [(t, t.number) for t in trials if t.number is not None]
    for state, (color, marker) in _STYLES.items():
        shown = [(placed[t.name], number) for t, number in drawn if t.state == state]
        if shown:
            look = {"s": 30, "color": color, "marker": marker, "label": state}
            panel.scatter(*zip(*shown, strict=True), **look)
    best = best_of(trials, maximizes=sweep.maximizes)
    if best is not None and best.number is not None:
        ring = {"facecolors": "none", "edgecolors": "black", "linewidths": 1.3}
        panel.scatter(placed[best.name], best.number, s=110, label="best", **ring)
    numbers = [number for trial, number in drawn if trial.state in _STYLES]
    if is_wide(min(numbers, default=0), max(numbers, default=0)):
        panel.set_yscale("log")
        label_decades(panel.yaxis)
    if panel.get_xscale() == "log":
        label_decades(panel.xaxis)
