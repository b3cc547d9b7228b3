"""The chart of the noise scale in its band, beside the size of the window."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from trainkit.cli.report.chart import Chart
from trainkit.cli.report.line import WINDOW, Line

SCALE, SEEN = f"{WINDOW}noise_scale", f"{WINDOW}samples_seen"
LOW, HIGH = f"{SCALE}_low", f"{SCALE}_high"
_ROOM = 4
"""How many times as far as the values the band is drawn at most."""

_OVER_STEPS = Chart(
    "noise_scale_by_step",
    "Noise scale",
    "The window in samples whose noise is as large as its gradient, with its 90 % "
    "interval, and the size of the window.",
    is_log=True,
    note="Where the interval has no upper end, the band ends at the top. This is a "
    "model's estimate, good to about a factor of 2.",
)
_OVER_SAMPLES = replace(_OVER_STEPS, key="noise_scale", over="samples seen")
KEYS = (_OVER_STEPS.key, _OVER_SAMPLES.key)


def noise_chart(columns: Mapping[str, Line]) -> Chart | None:
    """The chart, over the samples seen where all measured windows have them.

    Args:
        columns: those of `metrics.csv`.

    Returns:
        None if no noise scale was measured that a logarithmic axis can hold.
    """
    scale, seen = columns.get(SCALE), columns.get(SEEN)
    known = [] if scale is None else [value for _, value in scale.shown if value > 0]
    if scale is None or not known:
        return None
    at = {} if seen is None else dict(seen.shown)
    over_samples = all(step in at for step in scale.steps)
    sizes = {} if seen is None else window_sizes(seen)
    sizes = {step: size for step, size in sizes.items() if size > 0}
    everything = [*known, *sizes.values()]
    least, most = min(everything) / _ROOM, max(everything) * _ROOM

    def edge(name: str, unknown: float) -> list[float]:
        """An end of the interval at each measured step; the end of the axis if it is
        not known, or too far out."""
        ends = dict(columns[name].shown) if name in columns else {}
        return [min(max(ends.get(x, unknown), least), most) for x in scale.steps]

    values = [value if value > 0 else math.nan for value in scale.values]
    lines = [replace(scale, values=values, low=edge(LOW, least), high=edge(HIGH, most))]
    if sizes:
        window = Line("size of the window", [*sizes], [*sizes.values()])
        lines.append(replace(window, colour="other1", dash="dashed"))
    if not over_samples:
        return replace(_OVER_STEPS, lines=lines)
    moved = [replace(line, steps=[at[step] for step in line.steps]) for line in lines]
    return replace(_OVER_SAMPLES, lines=moved)


def window_sizes(seen: Line) -> dict[float, float]:
    """The samples of a window at each step, from those of all windows so far.

    >>> window_sizes(Line("", (1.0, 2.0, 12.0), (8.0, 16.0, 176.0)))
    {1.0: 8.0, 2.0: 8.0, 12.0: 16.0}
    """
    sizes, before, then = {}, 0.0, 0.0
    for step, samples in seen.shown:
        if step > then:
            sizes[step] = (samples - before) / (step - then)
        before, then = samples, step
    return sizes
