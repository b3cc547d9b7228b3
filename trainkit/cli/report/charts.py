"""Lines of numbers over steps, and charts as data: what each shows of a run."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle
from operator import itemgetter
from typing import Any

import numpy as np

from trainkit.lit.logs.metric_file import Row
from trainkit.pages.look import number

MOST = 1000
"""The most values that are all drawn."""
LARGEST = 1e250
"""A larger value is drawn as a gap, as infinity is: no axis can hold it."""
METRIC = "metric_"
"""The beginning of the keys of charts of metrics that are not ours."""
_OTHERS = ("other1", "other2", "other3", "other4")
_PHASE = re.compile(r"^(train|val|valid|validation|test)/")
_NO_CHARTS = re.compile(
    r"window/(\d+/)?(seen|samples_seen|noise_scale_low|noise_scale_high)"
)
_MOST_OTHERS = 12


@dataclass(frozen=True, eq=False)
class Line:
    """One line of a chart.

    Attributes:
        name: of the column, or what the legend calls it.
        steps: the steps of its values, rising.
        values: one for each step; NaN is a gap.
        colour: a name in `LIGHT`.
        dash: "solid", "dashed" or "dotted", as both matplotlib and CSS call it.
    """

    name: str
    steps: Sequence[float]
    values: Sequence[float]
    colour: str = "train"
    dash: str = "solid"

    @property
    def shown(self) -> list[tuple[float, float]]:
        """The points that can be drawn."""
        pairs = zip(self.steps, self.values, strict=True)
        return [(step, value) for step, value in pairs if math.isfinite(value)]

    def thinned(self) -> list[Sequence[float]]:
        """What is drawn: steps, values, and the lower and upper edges of a band.

        Of more than `MOST` values, equally many stretches are one point each: the mean,
        in a band from the least to the largest value. Else there is no band.
        """
        if len(self.steps) <= MOST:
            return [self.steps, self.values, (), ()]
        steps, values = (
            np.array_split(np.asarray(each), MOST // 4)
            for each in (self.steps, self.values)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a stretch may be one gap
            return [
                [float(of(stretch)) for stretch in stretches]
                for of, stretches in (
                    (np.max, steps),
                    (np.nanmean, values),
                    (np.nanmin, values),
                    (np.nanmax, values),
                )
            ]


def read_lines(rows: Sequence[Row]) -> dict[str, Line]:
    """Every column that holds numbers, by its name; what is not finite is a gap.

    >>> rows = [{"step": "0", "loss": "2.5"}, {"step": "1", "loss": "nan"}]
    >>> read_lines(rows)["loss"].values
    (2.5, nan)
    """
    columns: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        numbers = {name: _number(cell) for name, cell in row.items()}
        step = numbers.pop("step", None)
        numbers.pop("epoch", None)
        for name, value in numbers.items():
            if step is not None and value is not None:
                is_drawn = abs(value) <= LARGEST  # false for NaN, too
                point = (step, value if is_drawn else math.nan)
                columns.setdefault(name, []).append(point)
    found = {}
    for name, points in columns.items():
        steps, values = zip(*sorted(points, key=itemgetter(0)), strict=True)
        if not all(map(math.isnan, values)):
            found[name] = Line(name, steps, values)
    return found


def _number(cell: Any) -> float | None:
    try:
        return float(cell)
    except (ValueError, TypeError):  # a text, or more cells than columns
        return None


@dataclass(frozen=True, eq=False)
class Chart:
    """One chart: its lines, its axis and the texts beside them.

    Attributes:
        key: the name of its PNG.
        title: its heading.
        caption: a sentence that says what it shows.
        columns: a pattern of the names of its lines. Default: those of `WindowMonitor`
            that are called as its key, of one or several optimizers.
        from_zero: whether 0 is on the axis; else it becomes logarithmic if values are
            far apart.
        as_stairs: whether a value holds until the next one.
        is_share: whether values are shown as a percentage.
        lines: at least one, if it is drawn.
    """

    key: str
    title: str
    caption: str
    columns: str = ""
    from_zero: bool = False
    as_stairs: bool = False
    is_share: bool = False
    lines: Sequence[Line] = ()

    def text(self, value: float) -> str:
        """A value as the axis shows it."""
        return f"{number(100 * value)}%" if self.is_share else number(value)

    def last(self, line: Line) -> str:
        """The last value of a line, and where."""
        step, value = line.shown[-1]
        return f"{self.text(value)} at step {number(step)}"


_CHARTS = (
    Chart(
        "loss",
        "Loss",
        "The mean loss of all ranks, in each window and in each validation.",
        r"window/(\d+/)?loss|train[/_]loss(_step)?|val\w*[/_](.*[/_])?loss(_epoch)?",
    ),
    Chart(
        "weight",
        "Window weight{unit}",
        "How much each optimizer step counted, as the strategy weighs.",
        from_zero=True,
    ),
    Chart(
        "imbalance",
        "Imbalance",
        "The largest share of a micro-batch times their number; 1 is even.",
    ),
    Chart(
        "learning_rate",
        "Learning rate",
        "What the optimizer used.",
        r"lr-(?!.*-(momentum|weight_decay)$).*",
        from_zero=True,
    ),
    Chart(
        "micro_batches",
        "Accumulation",
        "How many micro-batches, of all ranks, made a window.",
        from_zero=True,
        as_stairs=True,
    ),
    Chart(
        "grad_norm",
        "Gradient norm",
        "The 2-norm of the window's gradient, before clipping.",
    ),
    Chart(
        "padding",
        "Padding",
        "The share of tokens that only pad.",
        is_share=True,
        from_zero=True,
    ),
    Chart(
        "micro_batch_size",
        "Micro-batch size",
        "The limit of each micro-batch, which is found while the training runs.",
        from_zero=True,
        as_stairs=True,
    ),
    Chart(
        "noise_scale",
        "Noise scale",
        "The window, in samples, whose noise equals its gradient; good to a factor of "
        "2.",
    ),
)


def choose(
    columns: Mapping[str, Line], *, unit: str = ""
) -> tuple[list[Chart], list[str]]:
    """The charts that have data, and what is not drawn.

    Args:
        columns: the lines of a run by their names.
        unit: what weights count, if it has a name.
    """
    charts = []
    left = {name: line for name, line in columns.items() if not _NO_CHARTS.search(name)}
    for chart in _CHARTS:
        pattern = chart.columns or rf"window/(\d+/)?{chart.key}"
        own = [name for name in left if re.fullmatch(pattern, name)]
        title = chart.title.format(unit=f", in {unit}" if unit else "")
        lines = _coloured(left.pop(name) for name in own)
        if lines:
            charts.append(replace(chart, title=title, lines=lines))
    # Training and validation share the chart of a metric that is not ours.
    others: dict[str, list[Line]] = {}
    for name, line in left.items():
        others.setdefault(_PHASE.sub("", name), []).append(line)
    groups = [[line.name for line in lines] for lines in others.values()]
    for names in groups[:_MOST_OTHERS]:
        key = METRIC + re.sub(r"[^A-Za-z0-9._-]+", "_", names[0])[:100]
        lines = _coloured(left[name] for name in names)
        holds = names[0].startswith("lr_scaling/")
        chart = Chart(key, " and ".join(names), "As it was logged.", as_stairs=holds)
        charts.append(replace(chart, lines=lines))
    rest = [name for names in groups[_MOST_OTHERS:] for name in names]
    return charts, [f"{len(rest)} more columns: {', '.join(rest)}"] if rest else []


def _coloured(lines: Iterable[Line]) -> list[Line]:
    """The lines in their colours, all after the first one dashed."""
    looks = chain([("train", "solid")], cycle((each, "dashed") for each in _OTHERS))
    validation = ("validation", "solid")
    found = []
    for line in lines:
        is_validation = line.name.startswith("val")
        colour, dash = validation if is_validation else next(looks)
        found.append(replace(line, colour=colour, dash=dash))
    return found
