"""Lines of charts: the columns of a `metrics.csv` as numbers over steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from statistics import fmean

from trainkit.lit.logs.metric_file import Row

WINDOW = "window/"
"""The beginning of `WindowMonitor`'s columns; each logged window fills them all."""
_OF_SOME = ("noise_scale", "noise_scale_low", "noise_scale_high", "efficiency")
"""The ends of the columns of `NoiseScale`, which measures some windows only."""
LARGEST = 1e250
"""A larger value is drawn as a gap, as infinity is: no axis can hold it."""


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        name: of the column, or what the legend calls it.
        steps: the steps of its values, rising.
        values: one for each step; NaN is a gap.
        low: the lower edge of a band around it, at each step, or empty.
        high: the upper edge, or empty.
        colour: a name in `LIGHT`; "plan" is drawn broad and pale.
        dash: "solid", "dashed" or "dotted", as both matplotlib and CSS call it.
    """

    name: str
    steps: Sequence[float]
    values: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    colour: str = "train"
    dash: str = "solid"

    @cached_property
    def shown(self) -> list[tuple[float, float]]:
        """The points that can be drawn."""
        pairs = zip(self.steps, self.values, strict=True)
        return [(step, value) for step, value in pairs if math.isfinite(value)]

    @property
    def alone(self) -> list[int]:
        """The places of points between two gaps, which no line connects.

        >>> Line("", (0, 1, 2, 3), (5.0, math.nan, 4.0, 3.0)).alone
        [0]
        """
        there = [False, *map(math.isfinite, self.values), False]
        places = range(len(self.values))
        return [n for n in places if there[n : n + 3] == [False, True, False]]

    def is_long(self, most: int) -> bool:
        """Whether more than so many values would be drawn."""
        return len(self.steps) > most

    def thinned(self, most: int) -> Line:
        """The line as it is drawn, if it may have so many values.

        Of a longer line, a quarter as many equal stretches of steps are one point each:
        the mean, in a band from the least to the largest value. The first and the last
        value stay. After a stretch with a gap there is a gap. A line that has a band
        already is drawn at evenly some of its steps.
        """
        if not self.is_long(most):
            return self
        if self.low:
            last = len(self.steps) - 1
            places = [*range(0, last, math.ceil(last / most)), last]
            every = (self.steps, self.values, self.low, self.high)
            points = [tuple(each[n] for each in every) for n in places]
        else:
            points = self._means(most // 4)
        steps, values, low, high = zip(*points, strict=True)
        return replace(self, steps=steps, values=values, low=low, high=high)

    def _means(self, stretches: int) -> list[tuple[float, ...]]:
        first, last = self.steps[0], self.steps[-1]
        width = (last - first) / stretches or 1
        inner = zip(self.steps[1:-1], self.values[1:-1], strict=True)
        points = [(first, *[self.values[0]] * 3)]
        for _, stretch in groupby(inner, lambda point: (point[0] - first) // width):
            steps, values = zip(*stretch, strict=True)
            finite = [value for value in values if math.isfinite(value)]
            if finite:
                middle = steps[(len(steps) - 1) // 2]
                points.append((middle, fmean(finite), min(finite), max(finite)))
            if len(finite) < len(values):
                points.append((steps[-1], math.nan, math.nan, math.nan))
        return [*points, (last, *[self.values[-1]] * 3)]


def read_lines(rows: Sequence[Row]) -> dict[str, Line]:
    """Every column that holds numbers, by its name.

    A value that is not finite is a gap. So is a missing value in the row of a window:
    `WindowMonitor` does not log NaN. What only some windows have is not missing.

    >>> rows = [{"step": "0", "loss": "2.5"}, {"step": "1", "loss": "nan"}]
    >>> read_lines(rows)["loss"].values
    (2.5, nan)
    """
    names = dict.fromkeys(name for row in rows for name in row)
    columns: dict[str, list[tuple[float, float]]] = {
        name: [] for name in names if name not in (None, "step", "epoch")
    }  # None: further cells of a damaged row
    families = _families(columns)
    for row in rows:
        step = _number(row.get("step", ""))
        if step is None or not math.isfinite(step):
            continue
        values = {n: _number(cell) for n, cell in row.items() if n in columns}
        for members in families.values():
            if not row.keys().isdisjoint(members):
                values = dict.fromkeys(members, math.nan) | values
        for name, value in values.items():
            if value is not None:
                is_drawn = abs(value) <= LARGEST  # false for NaN, too
                columns[name].append((step, value if is_drawn else math.nan))
    found = {}
    for name, points in columns.items():
        if any(not math.isnan(value) for _, value in points):
            points.sort(key=lambda point: point[0])  # stable; mostly in order
            steps, values = zip(*points, strict=True)
            found[name] = Line(name, steps, values)
    return found


def _families(names: Iterable[str]) -> dict[str, list[str]]:
    """Columns that one window fills, such as `window/loss` and `window/weight`."""
    families: dict[str, list[str]] = {}
    for name in names:
        if name.startswith(WINDOW) and name.rpartition("/")[2] not in _OF_SOME:
            families.setdefault(name.rpartition("/")[0], []).append(name)
    return families


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:  # a text
        return None
