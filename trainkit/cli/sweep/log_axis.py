"""Ticks of a logarithmic axis that spans less than two decades."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trainkit.cli.sweep.table import brief

if TYPE_CHECKING:
    from matplotlib.axis import Axis

_DECADES = 2
"""From here on a label for each power of ten is enough, which is what there is."""
_FEWEST = 3
_WIDE = 30
"""A value over so many times its least is drawn by its logarithm."""


def is_wide(least: float, most: float) -> bool:
    """Whether an axis from one to the other is better a logarithmic one.

    >>> is_wide(0.01, 1.0), is_wide(1.0, 2.0), is_wide(0.0, 1.0)
    (True, False, False)
    """
    return least > 0 and most / least > _WIDE


def label(axis: Axis) -> None:
    """Take the place of labels such as 6x10^-2, which would run into each other."""
    from matplotlib.ticker import MaxNLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    if math.log10(high / low) >= _DECADES:
        return
    ticks = one_two_five(low, high)
    if len(ticks) < _FEWEST:
        evenly = MaxNLocator(4).tick_values(low, high)
        ticks = [float(tick) for tick in evenly if low <= tick <= high]
    axis.set_ticks(ticks, [brief(tick) for tick in ticks])
    axis.set_minor_formatter(NullFormatter())


def one_two_five(low: float, high: float) -> list[float]:
    """The numbers 1, 2 and 5, times powers of ten, between two others.

    >>> one_two_five(0.03, 1.5)
    [0.05, 0.1, 0.2, 0.5, 1.0]
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = (float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5))
    return [number for number in every if low <= number <= high]
