"""How much a run trained on in a second, from its rows and its `step_times.csv`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from trainkit.cli.report.series import WINDOW, Series
from trainkit.lit.logs.metric_file import read_rows

STEP_TIMES = "step_times.csv"
"""The file in the folder of a run."""
_COUNTS = {"samples_seen": "samples", "seen": ""}
"""Columns that count what was trained on; the second in the unit of the weights."""


def read_step_times(path: Path) -> dict[float, float]:
    """The seconds of each step, by the step; of a step's lines the last one counts.

    Raises:
        ValueError: the file is damaged.
    """
    times = {}
    for row in read_rows(path):
        try:
            times[float(row["step"])] = float(row["seconds"])
        except KeyError as error:
            raise ValueError(f"a row lacks {error}") from error
    return times


def throughput(
    columns: Mapping[str, Series], times: Mapping[float, float], unit: str
) -> list[Series]:
    """Samples in a second, and tokens if they are the unit of the weights.

    Between two logged windows both count all windows: what was seen, divided by the
    time of all steps. With several optimizers it is what the first one saw.

    Args:
        columns: the columns of `metrics.csv`.
        times: the seconds of each step.
        unit: the unit of the weights.
    """
    found = []
    for name, counted in _COUNTS.items():
        seen = columns.get(WINDOW + name) or columns.get(f"{WINDOW}0/{name}")
        counted = counted or (unit if unit == "tokens" else "")
        if seen is not None and counted and times:
            found.append(_rate(f"{counted} per second", seen, times))
    return [each for each in found if each.shown]


def _rate(name: str, seen: Series, times: Mapping[float, float]) -> Series:
    steps, values = [], []
    waiting = iter(sorted(times.items()))
    ahead = next(waiting, None)
    before = math.nan
    for step, number in zip(seen.steps, seen.values, strict=True):
        seconds = 0.0
        while ahead is not None and ahead[0] <= step:
            seconds += ahead[1]
            ahead = next(waiting, None)
        steps.append(step)
        values.append((number - before) / seconds if seconds > 0 else math.nan)
        before = number
    known = [place for place, value in enumerate(values) if math.isfinite(value)]
    first = known[0] if known else len(values)  # before it the time is not known
    return Series(name, tuple(steps[first:]), tuple(values[first:]))
