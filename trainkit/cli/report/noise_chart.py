"""The chart of the noise scale in its band, beside the size of the window."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from trainkit.cli.report.chart import Chart, Line
from trainkit.cli.report.series import WINDOW, Series

SCALE, SEEN = f"{WINDOW}noise_scale", f"{WINDOW}samples_seen"
LOW, HIGH = f"{SCALE}_low", f"{SCALE}_high"
_ROOM = 4
"""How many times as far as the values the band is drawn at most."""

_NOTE = (
    "Where the interval has no upper end, the band ends at the top. This is a model's "
    "estimate, good to about a factor of 2."
)
_OVER_STEPS = Chart(
    "noise_scale_by_step",
    "Noise scale",
    "The window in samples whose noise is as large as its gradient, with its 90 % "
    "interval, and the size of the window.",
    is_log=True,
    note=_NOTE,
)
_OVER_SAMPLES = replace(_OVER_STEPS, key="noise_scale", over="samples seen")
KEYS = (_OVER_STEPS.key, _OVER_SAMPLES.key)


def noise_chart(columns: Mapping[str, Series]) -> Chart | None:
    """The chart, over the samples seen where all measured windows have them.

    Args:
        columns: those of `metrics.csv`.

    Returns:
        None if no noise scale was measured that a logarithmic axis can hold.
    """
    scale, seen = columns.get(SCALE), columns.get(SEEN)
    known = {} if scale is None else {x: y for x, y in scale.shown if y > 0}
    if scale is None or not known:
        return None
    at = {} if seen is None else dict(seen.shown)
    over_samples = all(step in at for step in scale.steps)
    sizes = window_sizes(seen) if seen is not None else {}
    sizes = {step: size for step, size in sizes.items() if size > 0}
    values = [*known.values(), *sizes.values()]
    ends = min(values) / _ROOM, max(values) * _ROOM
    band = _edge(columns, LOW, scale, *ends), _edge(columns, HIGH, scale, *ends)
    lines = [Line(SCALE, "train", _of(SCALE, scale.steps, known), band=band)]
    if sizes:
        lines.append(
            Line("size of the window", "other1", _of(SEEN, [*sizes], sizes), "dashed")
        )
    if not over_samples:
        return replace(_OVER_STEPS, lines=tuple(lines))
    return replace(_OVER_SAMPLES, lines=tuple(_moved(line, at) for line in lines))


def _of(name: str, steps: Sequence[float], values: Mapping[float, float]) -> Series:
    return Series(name, tuple(steps), tuple(values.get(x, math.nan) for x in steps))


def _edge(
    columns: Mapping[str, Series], name: str, scale: Series, least: float, most: float
) -> Series:
    """An end of the interval at each measured step; the end of the axis if it is not
    known, or too far out."""
    column = columns.get(name)
    known = {} if column is None else dict(column.shown)
    unknown = least if name == LOW else most
    inside = {x: min(max(known.get(x, unknown), least), most) for x in scale.steps}
    return _of(name, scale.steps, inside)


def _moved(line: Line, at: Mapping[float, float]) -> Line:
    """The line over other numbers than steps."""

    def moved(series: Series) -> Series:
        return replace(series, steps=tuple(at[step] for step in series.steps))

    band = None if line.band is None else (moved(line.band[0]), moved(line.band[1]))
    return replace(line, series=moved(line.series), band=band)


def window_sizes(seen: Series) -> dict[float, float]:
    """The samples of a window at each step, from those of all windows so far.

    >>> window_sizes(Series("", (1.0, 2.0, 12.0), (8.0, 16.0, 176.0)))
    {1.0: 8.0, 2.0: 8.0, 12.0: 16.0}
    """
    sizes, before, then = {}, 0.0, 0.0
    for step, samples in seen.shown:
        if step > then:
            sizes[step] = (samples - before) / (step - then)
        before, then = samples, step
    return sizes
