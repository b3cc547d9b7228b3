"""A picture of a sweep: its metric over the trials and over each swept parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.cli.sweep.sweep_file import SweepFile, is_number
from trainkit.cli.sweep.trial import Trial, best_of, brief
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

    shown = [t for t in trials if t.number is not None and t.state in _STYLES]
    numbers = [trial.number or 0.0 for trial in shown]
    best = best_of(trials, maximizes=sweep.maximizes)
    names = ["trial", *sweep.varied][:_MOST_PANELS]
    columns = 2 if len(names) == 4 else min(3, len(names))
    rows = math.ceil(len(names) / columns)
    size = (4.4 * columns, 3.4 * rows)
    figure = Figure(size, dpi=150, layout="constrained")  # it needs no window
    for at, name in enumerate(names, 1):
        panel = figure.add_subplot(rows, columns, at, xlabel=name)
        panel.set_ylabel(sweep.metric_name or "metric")
        places = _places(panel, sweep, shown) if at > 1 else map(trials.index, shown)
        for trial, place, number in zip(shown, places, numbers, strict=True):
            colour, marker = _STYLES[trial.state]
            panel.scatter(place, number, s=30, color=colour, marker=marker)
            if trial is best:
                ring = {"facecolors": "none", "edgecolors": "black", "linewidths": 1.3}
                panel.scatter(place, number, s=110, **ring)
        if is_wide(min(numbers, default=0), max(numbers, default=0)):
            panel.set_yscale("log")
            label_decades(panel.yaxis)
        tidy(panel)
    states = [trial.state for trial in trials]
    counts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    title = f"{sweep.name or sweep.path.stem}: {sweep.method}, {', '.join(counts)}"
    figure.suptitle(f"{title}\nsquares: stopped early; in a ring: the best", size=10)
    figure.savefig(path)
    return path


def _places(panel: Axes, sweep: SweepFile, trials: Sequence[Trial]) -> Sequence[Any]:
    """Make the axis of a parameter; returns the places of the trials on it."""
    parameter = sweep.varied[name := panel.get_xlabel()]
    values: list[Any] = [trial.flat.get(name) for trial in trials]
    if not parameter.values and all(map(is_number, values)):
        if "log" in parameter.kind and min(values, default=0) > 0:
            panel.set_xscale("log")
            panel.set_xlim(min(values) / 1.3, max(values) * 1.3)
            label_decades(panel.xaxis)
        return values
    texts = list(dict.fromkeys(map(brief, [*parameter.values, *values])))
    step = math.ceil(len(texts) / _MOST_TICKS)
    panel.set_xticks(range(0, len(texts), step), texts[::step])
    panel.set_xlim(-0.5, len(texts) - 0.5)
    return [texts.index(brief(value)) for value in values]
