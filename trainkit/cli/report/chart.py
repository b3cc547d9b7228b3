"""Charts as data, from which the page and the PNGs are drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from trainkit.cli.report.series import Drawn, Series
from trainkit.pages.look import is_wide, number

STEP = "step"
"""What the horizontal axis counts, if a chart says nothing else."""
_EARLY = 0.25
"""The share of the steps whose largest values a clipped axis may leave out."""
_STEEP = 4
"""An axis is clipped if its early values make it so many times as long."""
_FEW = 20
"""An axis is not clipped if so few values are drawn."""
_COLOURS = ("train", "validation", "other1", "other2", "other3", "other4")
_DASHES = ("solid", "dashed", "dotted")


def look_of_run(place: int) -> tuple[str, str]:
    """The colour and the dashes of one of several runs."""
    turn = place // len(_COLOURS) % len(_DASHES)
    return _COLOURS[place % len(_COLOURS)], _DASHES[turn]


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        label: its name in the legend.
        colour: a name in `LIGHT`; "plan" is drawn broad and pale.
        dash: "solid", "dashed" or "dotted", as both matplotlib and CSS call it.
        band: the lower and the upper edge of a band, at the steps of the line.
    """

    label: str
    colour: str
    series: Series
    dash: str = "solid"
    band: tuple[Series, Series] | None = None

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
        last = len(self.series.steps) - 1
        stride = math.ceil((last + 1) / (4 * most))
        places = [*range(0, last, stride), last]
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
        may_be_log: whether the axis becomes logarithmic if values are far apart, or
            ends early if the first values are high.
        as_stairs: whether a value holds until the next one.
        is_log: whether its axis is logarithmic, however near its values are.
        has_bands: whether long lines have a band from their least to their largest.
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
    is_log: bool = False
    has_bands: bool = True
    over: str = STEP
    note: str = ""

    @cached_property
    def range(self) -> tuple[float, float]:
        """The least and the largest value."""
        values = [value for line in self.lines for value in line.values]
        return min(values), max(values)

    @cached_property
    def axis(self) -> Literal["whole", "log", "late"]:
        """Its axis; "late" ends at the largest value after the first quarter of the
        steps."""
        low, high = self.range
        if self.is_log or (self.may_be_log and is_wide(low, high)):
            return "log"
        num_values = max(len(line.series.shown) for line in self.lines)
        late = self.late[1]
        is_steep = late > low and high - low >= _STEEP * (late - low)
        is_late = self.may_be_log and is_steep and num_values > _FEW
        return "late" if is_late else "whole"

    @cached_property
    def late(self) -> tuple[float, float]:
        """The step at which the first quarter ends, and the largest value after it."""
        points = [point for line in self.lines for point in line.series.shown]
        steps = [step for step, _ in points]
        start = min(steps) + _EARLY * (max(steps) - min(steps))
        return start, max(value for step, value in points if step >= start)

    @property
    def clipped(self) -> str:
        """What an axis that ends early does not show."""
        if self.axis != "late":
            return ""
        start = number(math.ceil(self.late[0]))
        return f"before step {start} values go up to {self.text(self.range[1])}"

    def drawn(self, line: Line, most: int) -> Drawn:
        """The points of one of its lines, as `Line.drawn` gives them."""
        drawn = line.drawn(most)
        return drawn if self.has_bands else Drawn(drawn.steps, drawn.values)

    def notes(self, most: int) -> list[str]:
        """Remarks below the chart if its long lines are drawn in `most` stretches."""
        notes = [self.note] if self.note else []
        for line in self.lines:
            gaps = len(line.series.steps) - len(line.series.shown)
            rows = "row has" if gaps == 1 else "rows have"
            if gaps:
                notes.append(f"{line.label}: {gaps:,} {rows} no finite value: a gap.")
        long = [
            len(line.series.shown)
            for line in self.lines
            if line.series.is_long(most) and line.band is None
        ]
        if long:
            notes.append(
                f"Lines of up to {max(long):,} values are shown as the mean of each "
                f"stretch of steps"
                f"{' in a band from its least to its largest' * self.has_bands}."
            )
        return notes

    def text(self, value: float) -> str:
        """A value as the axis shows it."""
        return f"{number(100 * value)}%" if self.is_share else number(value)

    def last(self, line: Line) -> str:
        """The last value of a line, and where."""
        step, value = line.series.shown[-1]
        at = (
            f"step {number(step)}"
            if self.over == STEP
            else f"{number(step)} {self.over}"
        )
        place = line.series.steps.index(step)
        ends = [edge.values[place] for edge in line.band or ()]
        around = f" ({' to '.join(map(self.text, ends))})" if ends else ""
        return f"{self.text(value)}{around} at {at}"


@dataclass(frozen=True)
class Charts:
    """All charts of a page.

    Attributes:
        shown: the charts that have data.
        left_out: the names of the others, each with the reason.
    """

    shown: Sequence[Chart]
    left_out: Sequence[str] = ()

    @property
    def last_step(self) -> float:
        """The last step of which something was logged."""
        lines = [x for chart in self.shown if chart.over == STEP for x in chart.lines]
        ends = [x.series.shown[-1][0] for x in lines if x.colour != "plan"]
        return max(ends, default=0.0)
