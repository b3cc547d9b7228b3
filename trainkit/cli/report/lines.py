"""Lines of charts: the columns of a `metrics.csv` as numbers over steps."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np

from trainkit.lit.logs.metric_file import Row

MOST = 1000
"""The most values that are all drawn."""
LARGEST = 1e250
"""A larger value is drawn as a gap, as infinity is: no axis can hold it."""
SCALE, SEEN = "window/noise_scale", "window/samples_seen"
WINDOW_SIZE = "size of the window"
_ROOM = 4
"""How many times as far as the values the band of the noise scale is drawn at most."""


@dataclass(frozen=True, eq=False)
class Line:
    """One line of a chart.

    Attributes:
        name: of the column, or what the legend calls it.
        steps: the steps of its values, rising.
        values: one for each step; NaN is a gap.
        low: the lower edge of a band around it, at each step, or empty.
        high: the upper edge, or empty.
        colour: a name in `LIGHT`.
        dash: "solid", "dashed" or "dotted", as both matplotlib and CSS call it.
    """

    name: str
    steps: Sequence[float]
    values: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    colour: str = "train"
    dash: str = "solid"

    @property
    def shown(self) -> list[tuple[float, float]]:
        """The points that can be drawn."""
        pairs = zip(self.steps, self.values, strict=True)
        return [(step, value) for step, value in pairs if math.isfinite(value)]

    def thinned(self) -> Line:
        """The line as it is drawn.

        Of more than `MOST` values, equally many stretches are one point each: the mean,
        in a band from the least to the largest value.
        """
        if len(self.steps) <= MOST:
            return self

        def each(of: Callable[[Any], Any], numbers: Sequence[float]) -> list[float]:
            stretches = np.array_split(np.asarray(numbers), MOST // 4)
            return [float(of(stretch)) for stretch in stretches]

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a stretch may be one gap
            return replace(
                self,
                steps=each(np.max, self.steps),
                values=each(np.nanmean, self.values),
                low=each(np.nanmin, self.low or self.values),
                high=each(np.nanmax, self.high or self.values),
            )


def read_lines(rows: Sequence[Row]) -> dict[str, Line]:
    """Every column that holds numbers, by its name; what is not finite is a gap.

    >>> rows = [{"step": "0", "loss": "2.5"}, {"step": "1", "loss": "nan"}]
    >>> read_lines(rows)["loss"].values
    (2.5, nan)
    """
    columns: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        step = _number(row.get("step"))
        for name, cell in row.items():
            value = _number(cell)
            if step is not None and value is not None and name not in ("step", "epoch"):
                is_drawn = abs(value) <= LARGEST  # false for NaN, too
                point = (step, value if is_drawn else math.nan)
                columns.setdefault(name, []).append(point)
    found = {}
    for name, points in columns.items():
        steps, values = zip(*sorted(points, key=itemgetter(0)), strict=True)
        if not all(map(math.isnan, values)):
            found[name] = Line(name, steps, values)
    return found


def _number(cell: Any) -> float | None:
    try:
        return float(cell)
    except (ValueError, TypeError):  # a text, or more cells than columns
        return None


def window_sizes(columns: Mapping[str, Line]) -> dict[float, float]:
    """The samples of a window at each step, from those of all windows so far.

    >>> window_sizes({SEEN: Line(SEEN, (1.0, 2.0, 12.0), (8.0, 16.0, 176.0))})
    {1.0: 8.0, 2.0: 8.0, 12.0: 16.0}
    """
    seen = [(0.0, 0.0), *(columns[SEEN].shown if SEEN in columns else ())]
    return {
        step: (samples - before) / (step - then)
        for (then, before), (step, samples) in pairwise(seen)
        if samples > before
    }


def noise_lines(columns: Mapping[str, Line]) -> dict[str, Line]:
    """The noise scale in its band, and the size of the window beside it.

    An end of the interval that is not known, or far out, is the end of the axis. A
    noise scale of 0 is a gap, for a logarithmic axis cannot hold it.
    """
    scale, sizes = columns.get(SCALE), window_sizes(columns)
    if scale is None or max(value for _, value in scale.shown) <= 0:
        return {}
    values = [value if value > 0 else math.nan for value in scale.values]
    scale = replace(scale, values=values)
    known = [*(value for _, value in scale.shown), *sizes.values()]
    least, most = min(known) / _ROOM, max(known) * _ROOM

    def edge(name: str, unknown: float) -> list[float]:
        ends = dict(columns[name].shown) if name in columns else {}
        return [min(max(ends.get(x, unknown), least), most) for x in scale.steps]

    low, high = edge(f"{SCALE}_low", least), edge(f"{SCALE}_high", most)
    lines = {SCALE: replace(scale, low=low, high=high)}
    if sizes:
        lines[WINDOW_SIZE] = Line(WINDOW_SIZE, [*sizes], [*sizes.values()])
    return lines
