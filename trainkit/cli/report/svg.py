"""A chart as an SVG that stands in a page, and its points for whoever hovers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from trainkit.cli.report.charts import Chart, Line
from trainkit.cli.report.series import Series
from trainkit.cli.report.ticks import Scale, labels, number

_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 10, 34
_HEIGHT = 250
_FEW = 40
"""So few points are drawn as points, too."""
_GAP = 6
"""Pixels that a label on the axis keeps from its neighbour."""


@dataclass(frozen=True)
class Drawn:
    """A chart on the page.

    Attributes:
        svg: the picture.
        points: for each line its label, class and points: x, y, step, text.
        notes: what is to be said below it.
    """

    svg: str
    points: list[dict[str, Any]]
    notes: list[str]


@dataclass(frozen=True)
class _Frame:
    """Where in the picture a step and a value are."""

    x: Scale
    y: Scale
    width: int

    def at(self, step: float, value: float) -> tuple[float, float]:
        along = self.width - _LEFT - _RIGHT
        up = _HEIGHT - _TOP - _BOTTOM
        return (
            round(_LEFT + along * self.x.place(step), 1),
            round(_HEIGHT - _BOTTOM - up * self.y.place(value), 1),
        )


def draw(chart: Chart, name: str, *, width: int = 560) -> Drawn:
    """Draw a chart.

    Args:
        chart: with data.
        name: an id that no other has on the page.
        width: in pixels of its own; the page stretches it.
    """
    frame = _frame(chart, width)
    stretches = width // 2
    parts = _grid(chart, frame)
    points = []
    for line, style in zip(chart.lines, styles(chart), strict=True):
        series = line.series.thinned(stretches)
        if has_band(chart, line, stretches):
            parts += _line(chart, frame, series, f"{style} band")
            series = line.series.means(stretches // 2)
        parts += _line(chart, frame, series, style)
        points.append(_points(chart, frame, line, series, style))
    parts.append('<g class="hover"></g>')
    svg = (
        f'<svg viewBox="0 0 {width} {_HEIGHT}" role="img" tabindex="0" '
        f'aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{escape(chart.title)}</title>'
        f'<desc id="{name}-desc">{escape(described(chart))}</desc>'
        f"{''.join(parts)}</svg>"
    )
    return Drawn(svg, points, _notes(chart, stretches))


def styles(chart: Chart) -> list[str]:
    """The style of each line: its role, or a number among the others."""
    found: list[str] = []
    others = 0
    for line in chart.lines:
        if line.role == "other":
            others = others % 4 + 1
            found.append(f"other{others}")
        else:
            found.append(line.role)
    return found


def first_and_last(chart: Chart) -> tuple[float, float]:
    """Of its steps."""
    steps = [step for line in chart.lines for step, _ in line.series.shown]
    return min(steps), max(steps)


def has_band(chart: Chart, line: Line, stretches: int) -> bool:
    """Whether a line has more points than can be seen: then the mean is drawn, over a
    band from the least to the largest value."""
    return line.series.is_long(stretches) and not chart.as_stairs


def described(chart: Chart) -> str:
    """A chart for those who cannot see it."""
    said = [_in_words(line, is_share=chart.is_share) for line in chart.lines]
    return " ".join([chart.says, *said])


def value_text(value: float, *, is_share: bool) -> str:
    return f"{100 * value:.4g}%" if is_share else number(value)


def _in_words(line: Line, *, is_share: bool) -> str:
    shown = line.series.shown
    (first, begin), (last, end) = shown[0], shown[-1]
    values = [value for _, value in shown]
    texts = [
        value_text(value, is_share=is_share)
        for value in (begin, end, min(values), max(values))
    ]
    return (
        f"{line.label}: {texts[0]} at step {number(first)}, {texts[1]} at step "
        f"{number(last)}, from {texts[2]} to {texts[3]}."
    )


def _frame(chart: Chart, width: int) -> _Frame:
    shown = [point for line in chart.lines for point in line.series.shown]
    return _Frame(
        Scale.over((step for step, _ in shown), pad=0.01),
        Scale.over(
            (value for _, value in shown),
            from_zero=chart.from_zero,
            may_be_log=chart.may_be_log,
        ),
        width,
    )


def _grid(chart: Chart, frame: _Frame) -> list[str]:
    """Thin lines behind, with their numbers."""
    left, right = _LEFT, frame.width - _RIGHT
    bottom = _HEIGHT - _BOTTOM
    parts = []
    ticks = frame.y.ticks()
    for tick, label in zip(ticks, labels(ticks, percent=chart.is_share), strict=True):
        _, y = frame.at(frame.x.low, tick)
        parts.append(f'<path class="grid" d="M{left} {y}H{right}"/>')
        parts.append(f'<text class="y" x="{left - 8}" y="{y + 4:g}">{label}</text>')
    parts.append(f'<path class="axis" d="M{left} {bottom}H{right}"/>')
    ticks = frame.x.whole_ticks(*first_and_last(chart), most=8)
    end = -1.0
    for tick, label in zip(ticks, labels(ticks), strict=True):
        x, _ = frame.at(tick, frame.y.low)
        half = 3.5 * len(label)
        middle = min(x, frame.width - half)
        if middle - half > end:
            parts.append(f'<path class="axis" d="M{x} {bottom}v4"/>')
            parts.append(
                f'<text class="x" x="{middle}" y="{bottom + 17}">{label}</text>'
            )
            end = middle + half + _GAP
    parts.append(f'<text class="unit" x="{right}" y="{_HEIGHT - 4}">step</text>')
    return parts


def _line(chart: Chart, frame: _Frame, series: Series, style: str) -> list[str]:
    """The stretches of a line; a point that stands alone is a dot."""
    paths, dots = [], []
    for stretch in series.stretches():
        places = [frame.at(step, value) for step, value in stretch]
        if len(places) == 1 or (len(series.steps) <= _FEW and style != "plan"):
            dots += places
        if len(places) > 1:
            paths.append(_stairs(places) if chart.as_stairs else _straight(places))
    parts = [f'<path class="line {style}" d="{"".join(paths)}"/>'] if paths else []
    parts += [
        f'<circle class="dot {style}" cx="{x}" cy="{y}" r="2.2"/>' for x, y in dots
    ]
    return parts


def _straight(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in places)


def _stairs(places: Sequence[tuple[float, float]]) -> str:
    (x, y), *rest = places
    return f"M{x:g} {y:g}" + "".join(f"H{x:g}V{y:g}" for x, y in rest)


def _points(
    chart: Chart, frame: _Frame, line: Line, series: Series, style: str
) -> dict[str, Any]:
    places = [
        [*frame.at(step, value), step, value_text(value, is_share=chart.is_share)]
        for step, value in series.shown
    ]
    return {"label": line.label, "style": style, "at": places}


def _notes(chart: Chart, stretches: int) -> list[str]:
    notes = [chart.note] if chart.note else []
    for line in chart.lines:
        series = line.series
        gaps = len(series.steps) - len(series.shown)
        if gaps:
            rows = "row has" if gaps == 1 else "rows have"
            notes.append(f"{line.label}: {gaps:,} {rows} no finite value: a gap.")
    long = [line for line in chart.lines if has_band(chart, line, stretches)]
    if long:
        names = ", ".join(line.label for line in long)
        most = max(len(line.series.shown) for line in long)
        notes.append(
            f"{names}: {most:,} values, shown as the mean of each stretch of steps "
            f"in a band from its least to its largest."
        )
    return notes
