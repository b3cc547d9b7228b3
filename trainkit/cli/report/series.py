"""The columns of a `metrics.csv` as numbers over steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from trainkit.lit.logs.metric_file import Row

WINDOW = "window/"
"""The columns of `WindowMonitor`, all of which a logged window fills."""

LARGEST = 1e250
"""What is beyond is as good as infinite: no axis can hold it."""


@dataclass(frozen=True)
class Series:
    """A column's numbers.

    Attributes:
        name: the column's.
        steps: as they were logged under, rising.
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

    def stretches(self) -> list[list[tuple[float, float]]]:
        """The points between gaps.

        >>> Series("loss", (0, 1, 2, 3), (5.0, 4.0, math.nan, 3.0)).stretches()
        [[(0, 5.0), (1, 4.0)], [(3, 3.0)]]
        """
        found: list[list[tuple[float, float]]] = [[]]
        for step, value in zip(self.steps, self.values, strict=True):
            if math.isfinite(value):
                found[-1].append((step, value))
            elif found[-1]:
                found.append([])
        return [stretch for stretch in found if stretch]

    def is_long(self, most: int) -> bool:
        """Whether it has more points than so many stretches can show."""
        return len(self.steps) > 4 * most

    def thinned(self, most: int) -> Series:
        """The same to the eye, from fewer points.

        Of each of `most` equal stretches of steps the first, the least and the largest
        value and a gap are kept, where they are; and so are both ends.
        """
        if not self.is_long(most):
            return self
        kept = {0, len(self.steps) - 1}
        for bin_ in self._bins(most):
            kept.add(bin_[0])
            finite = [i for i in bin_ if math.isfinite(self.values[i])]
            if finite:
                kept.add(min(finite, key=self.values.__getitem__))
                kept.add(max(finite, key=self.values.__getitem__))
            kept.update([i for i in bin_ if not math.isfinite(self.values[i])][:1])
        order = sorted(kept)
        return replace(
            self,
            steps=tuple(self.steps[i] for i in order),
            values=tuple(self.values[i] for i in order),
        )

    def means(self, most: int) -> Series:
        """The mean of each of `most` equal stretches of steps, at its middle."""
        steps, values = [], []
        for bin_ in self._bins(most):
            finite = [i for i in bin_ if math.isfinite(self.values[i])]
            steps.append(self.steps[bin_[len(bin_) // 2]])
            total = math.fsum(self.values[i] / (len(finite) or 1) for i in finite)
            values.append(total if finite else math.nan)
        return replace(self, steps=tuple(steps), values=tuple(values))

    def _bins(self, number: int) -> Iterable[list[int]]:
        """Which places fall into each of so many stretches; those with none are out."""
        first, last = self.steps[0], self.steps[-1]
        width = (last - first) / number or 1
        bins: dict[int, list[int]] = {}
        for place, step in enumerate(self.steps):
            bins.setdefault(min(int((step - first) / width), number - 1), []).append(
                place
            )
        return bins.values()


def read_series(rows: Sequence[Row]) -> dict[str, Series]:
    """Every column that holds numbers, by its name.

    A value that is not finite is a gap, and so is one that a window should have
    logged and has not: `WindowMonitor` leaves out what is NaN.

    >>> rows = [{"step": "0", "loss": "2.5"}, {"step": "1", "loss": "nan"}]
    >>> read_series(rows)["loss"].values
    (2.5, nan)
    """
    names = dict.fromkeys(name for row in rows for name in row)
    columns: dict[str, list[tuple[float, float]]] = {
        name: [] for name in names if name not in (None, "step", "epoch")
    }  # None: cells of a damaged row, beyond the columns
    families = _families(columns)
    for row in rows:
        step = _number(row.get("step"))
        if step is None or not math.isfinite(step):
            continue
        for name in row.keys() & columns.keys():
            value = _number(row[name])
            if value is not None:
                is_drawn = abs(value) <= LARGEST  # and no NaN
                columns[name].append((step, value if is_drawn else math.nan))
        for name in _left_out(row, families):
            columns[name].append((step, math.nan))
    return {
        name: _series(name, points)
        for name, points in columns.items()
        if any(not math.isnan(value) for _, value in points)
    }


def _families(names: Iterable[str]) -> dict[str, list[str]]:
    """Columns that one window fills: `window/loss` and `window/weight`, say."""
    families: dict[str, list[str]] = {}
    for name in names:
        if name.startswith(WINDOW):
            families.setdefault(name.rpartition("/")[0], []).append(name)
    return families


def _left_out(row: Row, families: dict[str, list[str]]) -> list[str]:
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
    except ValueError:  # a text, or True
        return None
