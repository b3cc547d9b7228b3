"""Charts as data, from which the page and the PNGs are drawn."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from typing import Literal

from trainkit.cli.report.series import Drawn, Series
from trainkit.pages.look import is_wide, number, value_text

Role = Literal["train", "validation", "plan", "other", "run"]
Axis = Literal["whole", "log", "late"]
_EARLY = 0.25
"""The share of the steps whose largest values a clipped axis may leave out."""
_STEEP, _HIGH = 4, 1.3
"""How many times as long an axis is with its early values as without: from the first on
it is clipped, and from the second on it can be."""
_FAR = 2
"""From this ratio of the largest to the least value on an axis can be logarithmic."""
_FEW = 20
"""An axis is not clipped if so few values are drawn."""
_MOST_BANDS = 3
"""Of more runs there are only lines: their bands would lie on each other."""
STEP = "step"
"""What the horizontal axis counts, if a chart says nothing else."""
_STYLES = ("train", "validation", "other1", "other2", "other3", "other4")


def run_style(place: int) -> str:
    """The style of one of several runs."""
    return _STYLES[place % len(_STYLES)]


def run_dash(place: int) -> int:
    """0 for a whole line, else one of two patterns, when all styles are taken."""
    return place // len(_STYLES) % 3


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        label: its name in the legend.
        role: decides how it is drawn.
        place: of several runs, the place of its run.
        band: the lower and the upper edge of a band, at the steps of the line.
    """

    label: str
    role: Role
    series: Series
    place: int = 0
    band: tuple[Series, Series] | None = None

    @property
    def dash(self) -> int:
        """0 for a whole line, else one of two patterns."""
        if self.role == "run":
            return run_dash(self.place)
        return int(self.role == "other")

    @property
    def num_gaps(self) -> int:
        """How many of its rows have no finite value."""
        return len(self.series.steps) - len(self.series.shown)

    @property
    def values(self) -> list[float]:
        """All that is drawn, its band too."""
        every = (self.series, *(self.band or ()))
        return [value for series in every for _, value in series.shown]

    def drawn(self, most: int) -> Drawn:
        """The points as `Series.drawn` gives them; of a long line with a band of its
        own, evenly some."""
        if self.band is None:
            return self.series.drawn(most)
        places = range(len(self.series.steps))
        if self.series.is_long(most):
            last = places[-1]
            places = sorted({*places[:: math.ceil(len(places) / (4 * most))], last})
        every = (self.series.steps, self.series.values, *(s.values for s in self.band))
        return Drawn(*(tuple(each[n] for n in places) for each in every))


@dataclass(frozen=True)
class Chart:
    """One chart: its lines, its axis and the texts beside them.

    Attributes:
        key: the name of its PNG.
        title: its heading.
        caption: a sentence that says what it shows.
        lines: at least one.
        is_share: whether values are shown as a percentage.
        from_zero: whether 0 is on the axis.
        may_be_log: whether there is a choice of axes: logarithmic, if values are far
            apart, or without high values of the beginning.
        as_stairs: whether a value holds until the next one.
        is_always_log: whether its axis is logarithmic, however near its values are.
        over: what the other axis counts.
        note: a remark below it.
    """

    key: str
    title: str
    caption: str
    lines: tuple[Line, ...] = ()
    is_share: bool = False
    from_zero: bool = False
    may_be_log: bool = False
    as_stairs: bool = False
    is_always_log: bool = False
    over: str = STEP
    note: str = ""

    @cached_property
    def range(self) -> tuple[float, float]:
        """The least and the largest value."""
        values = [value for line in self.lines for value in line.values]
        return min(values), max(values)

    @property
    def axes(self) -> list[Axis]:
        """The axes to choose from, the best one first.

        "late" ends at the largest value after the first quarter of the steps.
        """
        axes: list[Axis] = ["whole"]
        if self.is_always_log:
            return ["log", "whole"]
        if not self.may_be_log:
            return axes
        low, high = self.range
        late = self.late[1]
        times = (high - low) / (late - low) if late > low else 0.0
        if 0 < _FAR * low <= high:
            axes.insert(0 if is_wide(low, high) else 1, "log")
        num_values = max(len(line.series.shown) for line in self.lines)
        if times > _HIGH and num_values > _FEW:
            is_best = times >= _STEEP and axes[0] != "log"
            axes.insert(0 if is_best else len(axes), "late")
        return axes

    @cached_property
    def late(self) -> tuple[float, float]:
        """The step at which the first quarter ends, and the largest value after it."""
        points = [point for line in self.lines for point in line.series.shown]
        steps = [step for step, _ in points]
        start = min(steps) + _EARLY * (max(steps) - min(steps))
        return start, max(value for step, value in points if step >= start)

    @property
    def clipped(self) -> str:
        """What the axis that ends early does not show."""
        start, _ = self.late
        most = self.text(self.range[1])
        return f"before step {number(math.ceil(start))} values go up to {most}"

    @property
    def is_log(self) -> bool:
        """Whether its axis is logarithmic."""
        return self.axes[0] == "log"

    def drawn(self, most: int) -> Iterator[tuple[Line, str, Drawn]]:
        """Each line with its style and its points, as `Series.drawn` gives them.

        The style is the line's role; other lines take turns at other1 to other4.
        """
        others = cycle(["other1", "other2", "other3", "other4"])
        for line in self.lines:
            if line.role == "run":
                style = run_style(line.place)
            else:
                style = next(others) if line.role == "other" else line.role
            drawn = line.drawn(most)
            if line.role == "run" and len(self.lines) > _MOST_BANDS:
                drawn = Drawn(drawn.steps, drawn.values)
            yield line, style, drawn

    def described(self) -> str:
        """The chart in words, for readers who cannot see it."""
        return " ".join([self.caption, *map(self._in_words, self.lines)])

    def notes(self, most: int) -> list[str]:
        """Remarks below the chart if its long lines are drawn in `most` stretches."""
        notes = [self.note] if self.note else []
        for line in self.lines:
            rows = "row has" if line.num_gaps == 1 else "rows have"
            if line.num_gaps:
                notes.append(
                    f"{line.label}: {line.num_gaps:,} {rows} no finite value: a gap."
                )
        long = [
            line
            for line in self.lines
            if line.series.is_long(most) and line.band is None
        ]
        if long:
            is_many = long[0].role == "run"
            names = "Long lines" if is_many else ", ".join(line.label for line in long)
            largest = max(len(line.series.shown) for line in long)
            bands = any(drawn.low for *_, drawn in self.drawn(most))
            notes.append(
                f"{names}: {largest:,} values, shown as the mean of each stretch of "
                f"steps{' in a band from its least to its largest' * bands}."
            )
        return notes

    def text(self, value: float) -> str:
        """A value as the axis shows it."""
        return value_text(value, is_share=self.is_share)

    def at(self, place: float) -> str:
        """A place on the horizontal axis in words."""
        said = number(place)
        return f"{STEP} {said}" if self.over == STEP else f"{said} {self.over}"

    def _in_words(self, line: Line) -> str:
        shown = line.series.shown
        (first, begin), (last, end) = shown[0], shown[-1]
        values = [value for _, value in shown]
        return (
            f"{line.label}: {self.text(begin)} at {self.at(first)}, "
            f"{self.text(end)} at {self.at(last)}, "
            f"from {self.text(min(values))} to {self.text(max(values))}."
        )


@dataclass(frozen=True)
class Charts:
    """All charts of a run.

    Attributes:
        shown: the charts that have data.
        left_out: the names of the others, each with the reason.
    """

    shown: tuple[Chart, ...]
    left_out: tuple[str, ...]
