"""The columns of a `metrics.csv` as numbers over steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from trainkit.lit.logs.metric_file import Row

WINDOW = "window/"
"""The beginning of `WindowMonitor`'s columns; each logged window fills them all."""

OF_SOME = ("noise_scale", "noise_scale_low", "noise_scale_high", "efficiency")
"""The ends of the columns of `NoiseScale`, which measures some windows only."""

LARGEST = 1e250
"""A larger value is drawn as a gap, as infinity is: no axis can hold it."""


@dataclass(frozen=True)
class Series:
    """A column's numbers.

    Attributes:
        name: the column's name.
        steps: the steps of its values, rising.
        values: one for each step; NaN is a gap.
    """

    name: str
    steps: tuple[float, ...]
    values: tuple[float, ...]

    @cached_property
    def shown(self) -> list[tuple[float, float]]:
        """The points that can be drawn."""
        pairs = zip(self.steps, self.values, strict=True)
        return [(step, value) for step, value in pairs if math.isfinite(value)]

    def is_long(self, most: int) -> bool:
        """Whether its points are not drawn one by one."""
        return len(self.steps) > 4 * most

    def drawn(self, most: int) -> Drawn:
        """The points of this column in a chart.

        Up to four times `most` points are drawn one by one. Of a longer column only the
        first and the last point are. Between them each of `most` equal stretches of
        steps is one point: the mean, with the least and the largest value. After a
        stretch with a gap there is a gap.
        """
        if not self.is_long(most):
            return Drawn(self.steps, self.values)
        points = [(self.steps[0], *[self.values[0]] * 3)]
        for stretch in self._stretches(most):
            steps, values = zip(*stretch, strict=True)
            finite = [value for value in values if math.isfinite(value)]
            if finite:
                mean = math.fsum(value / len(finite) for value in finite)
                least, largest = min(finite), max(finite)
                mean = min(max(mean, least), largest)  # despite rounding
                points.append((steps[(len(steps) - 1) // 2], mean, least, largest))
            if len(finite) < len(values):
                points.append((steps[-1], math.nan, math.nan, math.nan))
        points.append((self.steps[-1], *[self.values[-1]] * 3))
        return Drawn(*zip(*points, strict=True))

    def _stretches(self, most: int) -> Iterable[list[tuple[float, float]]]:
        """The points of each of `most` equal stretches of steps, without the first and
        the last point; empty stretches are left out."""
        first, last = self.steps[0], self.steps[-1]
        width = (last - first) / most or 1
        found: dict[int, list[tuple[float, float]]] = {}
        inner = slice(1, -1)
        for step, value in zip(self.steps[inner], self.values[inner], strict=True):
            place = min(int((step - first) / width), most - 1)
            found.setdefault(place, []).append((step, value))
        return found.values()


@dataclass(frozen=True)
class Drawn:
    """The points of a line in a chart.

    Attributes:
        steps: rising; NaN among the values is a gap.
        values: one for each step.
        low: the least value of each stretch; empty if every value is drawn.
        high: the largest value of each stretch, or empty.
    """

    steps: tuple[float, ...]
    values: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    def alone(self) -> list[int]:
        """The places of points between two gaps, which no line connects.

        >>> Drawn((0, 1, 2, 3), (5.0, math.nan, 4.0, 3.0)).alone()
        [0]
        """
        is_there = [False, *map(math.isfinite, self.values), False]
        return [
            place
            for place in range(len(self.values))
            if is_there[place : place + 3] == [False, True, False]
        ]


def read_series(rows: Sequence[Row]) -> dict[str, Series]:
    """Every column that holds numbers, by its name.

    A value that is not finite is a gap. So is a missing value in the row of a window:
    `WindowMonitor` does not log NaN. What only some windows have is not missing.

    >>> rows = [{"step": "0", "loss": "2.5"}, {"step": "1", "loss": "nan"}]
    >>> read_series(rows)["loss"].values
    (2.5, nan)
    """
    names = dict.fromkeys(name for row in rows for name in row)
    columns: dict[str, list[tuple[float, float]]] = {
        name: [] for name in names if name not in (None, "step", "epoch")
    }  # None: further cells of a damaged row
    families = _families(columns)
    for row in rows:
        step = _number(row.get("step"))
        if step is None or not math.isfinite(step):
            continue
        for name in row.keys() & columns.keys():
            value = _number(row[name])
            if value is not None:
                is_drawn = abs(value) <= LARGEST  # false for NaN, too
                columns[name].append((step, value if is_drawn else math.nan))
        for name in _missing(row, families):
            columns[name].append((step, math.nan))
    return {
        name: _series(name, points)
        for name, points in columns.items()
        if any(not math.isnan(value) for _, value in points)
    }


def _families(names: Iterable[str]) -> dict[str, list[str]]:
    """Columns that one window fills, such as `window/loss` and `window/weight`."""
    families: dict[str, list[str]] = {}
    for name in names:
        if name.startswith(WINDOW) and name.rpartition("/")[2] not in OF_SOME:
            families.setdefault(name.rpartition("/")[0], []).append(name)
    return families


def _missing(row: Row, families: dict[str, list[str]]) -> list[str]:
    return [
        name
        for members in families.values()
        if any(member in row for member in members)
        for name in members
        if name not in row
    ]


def _series(name: str, points: list[tuple[float, float]]) -> Series:
    points = sorted(points, key=lambda point: point[0])  # stable; mostly in order
    steps, values = zip(*points, strict=True)
    return Series(name, steps, values)


def _number(cell: str | None) -> float | None:
    try:
        return float(cell or "")
    except ValueError:  # a text
        return None
