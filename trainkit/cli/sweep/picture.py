"""A picture of a sweep: its metric over each swept parameter, and the best so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.cli.sweep.parameters import is_number
from trainkit.cli.sweep.sweep_file import SweepFile
from trainkit.cli.sweep.table import brief
from trainkit.cli.sweep.trial import Trial, best_of
from trainkit.pages.look import LIGHT, is_wide, label_decades, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES = {
    "finished": {"color": LIGHT["train"], "marker": "o"},
    "stopped": {"color": "#e69f00", "marker": "s"},
}
_CRASHED = LIGHT["validation"]
_COLUMNS = 3
_MOST_PANELS = 12
_MOST_TICKS = 8


def draw(sweep: SweepFile, trials: Sequence[Trial], path: Path) -> Path:
    """Write a picture of the trials as a PNG.

    A trial that was stopped early is a square, and the best trial has a ring. A crashed
    trial is a cross at its arguments, on the edge of the worst metric.
    """
    from matplotlib.figure import Figure

    names = list(sweep.varied)[: _MOST_PANELS - 1]
    num_panels = len(names) + 1
    columns = 2 if num_panels == 4 else min(_COLUMNS, num_panels)
    rows = math.ceil(num_panels / columns)
    size = (4.4 * columns, 3.4 * rows)
    figure = Figure(size, dpi=150, layout="constrained")  # it needs no window
    panels = [figure.add_subplot(rows, columns, n + 1) for n in range(num_panels)]
    _draw_progress(panels[0], sweep, trials)
    for panel, name in zip(panels[1:], names, strict=True):
        _draw_parameter(panel, sweep, trials, name)
    for panel in panels:
        _finish(panel, sweep, trials)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    title = sweep.config.get("name") or sweep.path.stem
    figure.suptitle(f"{title}: {sweep.method}, {_counts(trials)}")
    figure.savefig(path)
    return path


def _draw_progress(panel: Axes, sweep: SweepFile, trials: Sequence[Trial]) -> None:
    """Draw the metric in the order of the trials, and the best until each of them."""
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    order = range(len(trials))  # as their names are numbered
    _scatter(panel, sweep, trials, order)
    finished = [t.number if t.state == "finished" else None for t in trials]
    better = np.fmax if sweep.maximizes else np.fmin  # which pass over NaN
    best = better.accumulate(np.array(finished, dtype=float))
    panel.step(order, best, where="post", color="0.4", lw=1.2, label="best so far")
    panel.set_xlabel("trial")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_parameter(
    panel: Axes, sweep: SweepFile, trials: Sequence[Trial], name: str
) -> None:
    values = [trial.flat.get(name) for trial in trials]
    listed = sweep.varied[name].get("values", [])
    if all(map(is_number, [*values, *listed])):
        _scatter(panel, sweep, trials, values)
        if _is_logarithmic(sweep, name, values):
            panel.set_xscale("log")
            label_decades(panel.xaxis)
        _mark_listed(panel, listed)
    else:
        texts = sorted({brief(value) for value in values})
        places = {text: place for place, text in enumerate(texts)}
        _scatter(panel, sweep, trials, [places[brief(value)] for value in values])
        panel.set_xticks(range(len(texts)), texts, rotation=20 if len(texts) > 4 else 0)
        panel.set_xlim(-0.5, len(texts) - 0.5)
    panel.set_xlabel(name)


def _mark_listed(panel: Axes, listed: Sequence[Any]) -> None:
    """Label the axis with the values of a parameter that lists them."""
    from matplotlib.ticker import NullLocator

    if 0 < len(listed) <= _MOST_TICKS:
        panel.xaxis.set_minor_locator(NullLocator())
        panel.set_xticks(listed, [brief(value) for value in listed])


def _scatter(
    panel: Axes, sweep: SweepFile, trials: Sequence[Trial], places: Sequence[Any]
) -> None:
    for state, style in _STYLES.items():
        shown = [
            (place, trial.number)
            for place, trial in zip(places, trials, strict=True)
            if trial.state == state and _is_drawn(trial)
        ]
        if shown:
            panel.scatter(*zip(*shown, strict=True), s=30, label=state, **style)
    lost = [
        place
        for place, trial in zip(places, trials, strict=True)
        if trial.state == "crashed" or (trial.is_over and not _is_drawn(trial))
    ]
    if lost:
        panel.plot(
            lost,
            [0.0 if sweep.maximizes else 1.0] * len(lost),  # far from the best
            "x",
            color=_CRASHED,
            transform=panel.get_xaxis_transform(),
            clip_on=False,
            label="crashed, or no number",
        )
    best = best_of(trials, maximizes=sweep.maximizes)
    if best is not None:
        place = places[trials.index(best)]
        ring = {"facecolors": "none", "edgecolors": "black", "linewidths": 1.3}
        panel.scatter([place], [best.metric[-1]], s=110, label="best", **ring)


def _finish(panel: Axes, sweep: SweepFile, trials: Sequence[Trial]) -> None:
    shown = [t.number for t in trials if t.number is not None and _is_drawn(t)]
    if is_wide(min(shown, default=0), max(shown, default=0)):
        panel.set_yscale("log")
        label_decades(panel.yaxis)
    panel.set_ylabel(sweep.metric or "metric")
    tidy(panel)


def _is_drawn(trial: Trial) -> bool:
    return trial.number is not None and trial.state in _STYLES


def _is_logarithmic(sweep: SweepFile, name: str, values: Sequence[Any]) -> bool:
    """Whether a parameter's axis is logarithmic, by its distribution or its values."""
    listed = sweep.varied[name].get("values", [])
    if min([*values, *listed]) <= 0:
        return False
    if "log" in str(sweep.varied[name].get("distribution", "")):
        return True
    listed = sorted(set(listed))
    factors = [b / a for a, b in zip(listed, listed[1:], strict=False)]
    return len(factors) > 1 and min(factors) > 1.5


def _counts(trials: Sequence[Trial]) -> str:
    states = [trial.state for trial in trials]
    found = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    return ", ".join(found) or "no trials"
