"""Charts as data, from which the page and the PNGs are drawn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from typing import Literal

from trainkit.cli.report.series import Drawn, Series
from trainkit.pages.look import is_wide, number, value_text

Role = Literal["train", "validation", "plan", "other"]


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        label: its name in the legend.
        role: decides how it is drawn.
    """

    label: str
    role: Role
    series: Series

    @property
    def num_gaps(self) -> int:
        """How many of its rows have no finite value."""
        return len(self.series.steps) - len(self.series.shown)


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
        may_be_log: whether the axis is logarithmic if values are far apart.
        as_stairs: whether a value holds until the next one.
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
    note: str = ""

    @cached_property
    def range(self) -> tuple[float, float]:
        """The least and the largest value."""
        values = [value for line in self.lines for _, value in line.series.shown]
        return min(values), max(values)

    @property
    def is_log(self) -> bool:
        """Whether its axis is logarithmic."""
        return self.may_be_log and is_wide(*self.range)

    def drawn(self, most: int) -> Iterator[tuple[Line, str, Drawn]]:
        """Each line with its style and its points, as `Series.drawn` gives them.

        The style is the line's role; other lines take turns at other1 to other4.
        """
        others = cycle(["other1", "other2", "other3", "other4"])
        for line in self.lines:
            style = next(others) if line.role == "other" else line.role
            yield line, style, line.series.drawn(most)

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
        long = [line for line, _, drawn in self.drawn(most) if drawn.low]
        if long:
            names = ", ".join(line.label for line in long)
            largest = max(len(line.series.shown) for line in long)
            notes.append(
                f"{names}: {largest:,} values, shown as the mean of each stretch of "
                f"steps in a band from its least to its largest."
            )
        return notes

    def text(self, value: float) -> str:
        """A value as the axis shows it."""
        return value_text(value, is_share=self.is_share)

    def _in_words(self, line: Line) -> str:
        shown = line.series.shown
        (first, begin), (last, end) = shown[0], shown[-1]
        values = [value for _, value in shown]
        return (
            f"{line.label}: {self.text(begin)} at step {number(first)}, "
            f"{self.text(end)} at step {number(last)}, "
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
