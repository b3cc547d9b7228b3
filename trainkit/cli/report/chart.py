"""Charts as data, from which the page and the PNGs are drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from trainkit.cli.report.line import Line
from trainkit.pages.look import is_wide, number

STEP = "step"
"""What the horizontal axis counts, if a chart says nothing else."""
_EARLY = 0.25
"""The share of the steps whose largest values a clipped axis may leave out."""
_STEEP = 4
"""An axis is clipped if its early values make it so many times as long."""
_FEW = 20
"""An axis is not clipped if so few values are drawn."""


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
    lines: Sequence[Line] = ()
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
        """The least and the largest value, bands included."""
        every = [each for x in self.lines for each in (x.values, x.low, x.high)]
        values = [value for each in every for value in each if math.isfinite(value)]
        return min(values), max(values)

    @cached_property
    def axis(self) -> Literal["whole", "log", "late"]:
        """Its axis; "late" ends at the largest value after the first quarter of the
        steps."""
        low, high = self.range
        if self.is_log or (self.may_be_log and is_wide(low, high)):
            return "log"
        num_values = max(len(line.shown) for line in self.lines)
        late = self.late[1]
        is_steep = late > low and high - low >= _STEEP * (late - low)
        is_late = self.may_be_log and is_steep and num_values > _FEW
        return "late" if is_late else "whole"

    @cached_property
    def late(self) -> tuple[float, float]:
        """The step at which the first quarter ends, and the largest value after it."""
        points = [point for line in self.lines for point in line.shown]
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

    def drawn(self, line: Line, most: int) -> Line:
        """One of its lines with at most so many values."""
        thin = line.thinned(most)
        return thin if self.has_bands else replace(thin, low=(), high=())

    def notes(self, most: int) -> list[str]:
        """Remarks below the chart, whose lines have at most so many values."""
        notes = [self.note] if self.note else []
        for line in self.lines:
            gaps = len(line.steps) - len(line.shown)
            rows = "row has" if gaps == 1 else "rows have"
            if gaps:
                notes.append(f"{line.name}: {gaps:,} {rows} no finite value: a gap.")
        counts = [len(x.shown) for x in self.lines if x.is_long(most) and not x.low]
        if counts:
            band = " in a band from its least to its largest" * self.has_bands
            notes.append(
                f"Lines of up to {max(counts):,} values are shown as the mean of each "
                f"stretch of steps{band}."
            )
        return notes

    def text(self, value: float) -> str:
        """A value as the axis shows it."""
        return f"{number(100 * value)}%" if self.is_share else number(value)

    def at(self, step: float) -> str:
        """A place on the horizontal axis in words."""
        said = number(step)
        return f"{STEP} {said}" if self.over == STEP else f"{said} {self.over}"

    def last(self, line: Line) -> str:
        """The last value of a line, and where."""
        step, value = line.shown[-1]
        place = line.steps.index(step)
        ends = [self.text(edge[place]) for edge in (line.low, line.high) if edge]
        around = f" ({' to '.join(ends)})" if ends else ""
        return f"{self.text(value)}{around} at {self.at(step)}"


@dataclass(frozen=True)
class Charts:
    """All charts of a page.

    Attributes:
        shown: the charts that have data.
        left_out: what is not drawn, each with the reason.
    """

    shown: Sequence[Chart]
    left_out: Sequence[str] = ()

    @property
    def last_step(self) -> float:
        """The last step of which something was logged."""
        lines = [x for chart in self.shown if chart.over == STEP for x in chart.lines]
        ends = [line.shown[-1][0] for line in lines if line.colour != "plan"]
        return max(ends, default=0.0)
