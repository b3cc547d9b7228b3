"""Axes: from where to where, and which numbers stand along them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainkit.cli.sweep.log_axis import is_wide, one_two_five

_MOST = 7
_SCIENTIFIC = 1e7


@dataclass(frozen=True)
class Scale:
    """One axis.

    >>> scale = Scale.over([0.0, 40.0], pad=0.0)
    >>> scale.place(10.0), scale.ticks()
    (0.25, [0.0, 10.0, 20.0, 30.0, 40.0])

    Attributes:
        low: where it begins.
        high: where it ends, above `low`.
        is_log: whether equal distances are equal factors.
    """

    low: float
    high: float
    is_log: bool = False

    @classmethod
    def over(
        cls,
        values: Iterable[float],
        *,
        pad: float = 0.06,
        from_zero: bool = False,
        may_be_log: bool = False,
    ) -> Scale:
        """One that shows all of these.

        Args:
            values: at least one, none of them larger than `series.LARGEST`.
            pad: so much of the span is added on each side.
            from_zero: 0 is on it.
            may_be_log: by logarithm where they span many times the least.
        """
        shown = list(values)
        low, high = min(shown), max(shown)
        if may_be_log and is_wide(low, high):
            factor = (high / low) ** pad if math.isfinite(high / low) else 1.0
            return cls(low / factor or low, high * factor, is_log=True)
        if from_zero:
            low, high = min(low, 0.0), max(high, 0.0)
        if low == high == 0.0 and from_zero:  # a share of -100 % there is not
            high = 1.0
        if low == high:
            around = abs(low) * 0.1 or 1.0
            low, high = low - around, high + around
        margin = (high - low) * pad
        is_floor = from_zero and low == 0.0
        is_roof = from_zero and high == 0.0
        return cls(low - margin * (not is_floor), high + margin * (not is_roof))

    def place(self, value: float) -> float:
        """Where a value is, from 0 at the beginning to 1 at the end."""
        if self.is_log:
            low = math.log(self.low)
            return (math.log(value) - low) / (math.log(self.high) - low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int = _MOST) -> list[float]:
        """Round numbers on it, about `most`.

        >>> Scale(1.0, 2000.0, is_log=True).ticks()
        [1.0, 10.0, 100.0, 1000.0]
        """
        if self.is_log:
            return self._log_ticks(most)
        step = _round_step((self.high - self.low) / most)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        if last - first > 2 * most:  # the span is lost beside the values' own size
            return [self.low, self.high]
        return [_tidy(number * step, step) for number in range(first, last + 1)]

    def whole_ticks(self, first: float, last: float, most: int) -> list[float]:
        """Of these, whole numbers from a first to a last one: there is no half a step.

        >>> Scale(-0.1, 3.1).whole_ticks(0, 3, most=8)
        [0.0, 1.0, 2.0, 3.0]
        """
        ticks = self.ticks(most)
        return [tick for tick in ticks if tick.is_integer() and first <= tick <= last]

    def _log_ticks(self, most: int) -> list[float]:
        tens = [
            float(f"1e{power}")
            for power in range(
                math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1
            )
        ]
        if len(tens) < 3:
            return one_two_five(self.low, self.high)
        return tens[:: math.ceil(len(tens) / (most + 1))]


def labels(ticks: Sequence[float], *, percent: bool = False) -> list[str]:
    """What is written at ticks, all with as many decimals as they need.

    >>> labels([0.0, 0.5, 1.0]), labels([0.0, 20000.0]), labels([0.0, 2e-5])
    (['0', '0.5', '1'], ['0', '20,000'], ['0', '2e-05'])
    >>> labels([0.0, 0.05, 0.1], percent=True)
    ['0%', '5%', '10%']
    """
    return [_percent(tick) if percent else number(tick) for tick in ticks]


def number(value: float) -> str:
    """A number in at most six digits.

    >>> number(0.1 + 0.2), number(24000.0), number(3e9), number(-0.0)
    ('0.3', '24,000', '3e+09', '0')
    """
    if value == 0:
        return "0"
    if 1e4 <= abs(value) < _SCIENTIFIC:
        return f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"
    return f"{value:.6g}"


def _percent(value: float) -> str:
    return f"{number(100 * value)}%"


def _round_step(least: float) -> float:
    """The next of 1, 2 and 5, times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least)) if least > 0 else 0.0
    if not power:  # below the smallest number there is
        return least or 1.0
    return next(m * power for m in (1, 2, 5, 10) if m * power >= least * (1 - 1e-9))


def _tidy(value: float, step: float) -> float:
    """Without what a multiplication has left behind: 0.3, not 0.30000000000000004."""
    return round(value, max(0, 1 - math.floor(math.log10(step))))
