"""The meaning of a measured noise scale for windows, in words and as a schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainkit.core.noise.estimate import NoiseEstimate

FAR = 4
"""A window is far from the noise scale from this ratio on."""
WIDE = 4
"""An interval is wide from this ratio of its ends on: nothing is suggested then."""
FEWEST = 20
"""From fewer measured windows nothing is suggested."""
GROWTH = 8
"""How many times as large windows are suggested at most: what has been tried."""
LAST_PART = 1 / 3
"""The share of a run that shows how its windows are in the end."""

Line = tuple[str, str]


def advice(estimate: NoiseEstimate, unit: str = "samples") -> list[Line]:
    """Two lines, each with its label: the noise scale, and what to do with the window.

    >>> for line in advice(NoiseEstimate(210.0, 160.0, 280.0, 512.0, 1.0, 120)):
    ...     print(": ".join(line))
    noise scale: 210 samples (160 to 280, 90 %), over the last 120 measured windows
    window of 512: above the noise scale, so a larger one hardly helps: twice as large \
takes 15 % fewer steps and 71 % more samples to the same loss, by the estimate of a \
simple model

    Args:
        estimate: of the run.
        unit: what the weights count; tokens are shown beside samples.
    """
    counted = [_size(estimate, 1.0, "samples")]
    if unit == "tokens" and estimate.weight != 1:
        counted.append(_size(estimate, estimate.weight, "tokens"))
    window, low = estimate.window, estimate.low
    if window < low:
        what = "below the noise scale, so a larger one on more devices saves time"
    elif window > estimate.high:
        what = "above the noise scale, so a larger one hardly helps"
    else:
        what = "near the noise scale, so keep it"
    likely = estimate.samples if estimate.is_bounded else low
    least, most = ("", "") if estimate.is_bounded else ("at least ", "at most ")
    # To a loss a run takes 1 + B / W steps of W samples: arxiv.org/abs/1812.06162.
    more = (2 * window + likely) / (window + likely)
    return [
        (
            "noise scale",
            f"{', '.join(counted)}, over the last {estimate.num_windows:,} measured "
            f"windows",
        ),
        (
            f"window of {short(window)}",
            f"{what}: twice as large takes {least}{100 * (1 - more / 2):.0f} % fewer "
            f"steps and {most}{100 * (more - 1):.0f} % more samples to the same loss, "
            f"by the estimate of a simple model",
        ),
    ]


def short(number: float) -> str:
    """A number in three digits; all digits of a whole number below 10,000.

    >>> short(210.4), short(38149.2), short(512.0), short(4096), short(0.8123)
    ('210', '38,100', '512', '4,096', '0.812')
    """
    if float(number).is_integer() and number < 10_000:
        return f"{number:,.0f}"
    return f"{float(f'{number:.3g}'):,.10g}"


def _size(estimate: NoiseEstimate, weight: float, unit: str) -> str:
    """The noise scale in one unit, with its interval."""
    size, low, high = (
        short(weight * each) for each in (estimate.samples, estimate.low, estimate.high)
    )
    if not estimate.is_bounded:
        return f"at least {low} {unit}"
    return f"{size} {unit} ({low} to {high}, 90 %)"


@dataclass(frozen=True)
class Point:
    """A measured window: its step, and the noise scale and the window in samples."""

    step: int
    noise_scale: float
    window: float


@dataclass(frozen=True)
class Suggestion:
    """Windows for another run of as many samples.

    Attributes:
        sizes: from each step on, how many micro-batches a window has; empty if their
            number cannot be smaller.
        steps: how many steps the run then takes.
        why: a sentence.
    """

    sizes: dict[int, int]
    steps: int
    why: str

    @property
    def words(self) -> list[str]:
        """The overrides that choose them.

        >>> Suggestion({0: 2, 300: 8}, 475, "").words[1:]
        ['schedule=stages', 'schedule.sizes={0: 2, 300: 8}', 'schedule.unit=step']
        """
        if not self.sizes:
            return []
        if len(self.sizes) == 1:
            return [f"trainer.accumulate_grad_batches={self.sizes[0]}"]
        pairs = ", ".join(f"{start}: {size}" for start, size in self.sizes.items())
        return [
            "trainer.accumulate_grad_batches=1",
            "schedule=stages",
            f"schedule.sizes={{{pairs}}}",
            "schedule.unit=step",
        ]


def suggest(
    estimate: NoiseEstimate,
    curve: Sequence[Point],
    *,
    accumulate: int,
    steps: int,
    most: float = math.inf,
) -> Suggestion | None:
    """Other windows, if those of a run were far from its noise scale for long.

    Sizes are doubled or halved as often as they stay on the same side of the noise
    scale, so that a factor of 2 in it does not turn the advice over.

    Args:
        estimate: of the run.
        curve: what was measured, in the order of steps.
        accumulate: micro-batches in each of its windows, on a rank.
        steps: how many it has taken.
        most: the micro-batches of an epoch.

    Returns:
        None if the windows were near the scale for half of the time, if little was
        measured, or if an epoch has no more micro-batches.
    """
    is_sure = estimate.is_bounded and estimate.high <= WIDE * estimate.low
    if not (is_sure and curve and estimate.num_windows >= FEWEST):
        return None
    below = [each.noise_scale > FAR * each.window for each in curve]
    above = [each.window > FAR * each.noise_scale for each in curve]
    ratio = estimate.samples / estimate.window
    if sum(below) > len(curve) / 2 and ratio >= 2:
        return _larger(curve, below, ratio, accumulate, steps, most)
    if sum(above) > len(curve) / 2 and ratio <= 1 / 2:
        return _smaller(curve, above, ratio, accumulate, steps, most)
    return None


def _larger(
    curve: Sequence[Point],
    below: Sequence[bool],
    ratio: float,
    accumulate: int,
    steps: int,
    most: float,
) -> Suggestion | None:
    """Small windows at first, and larger ones from where all are far below."""
    times = min(ratio, GROWTH, most / accumulate)
    size = accumulate * 2 ** math.floor(math.log2(max(times, 1)))
    start = max(_since(curve, below), round(steps * LAST_PART))
    if size <= accumulate or start >= steps:
        return None
    new_steps = start + _steps(steps - start, accumulate, size, most)
    why = (
        f"{_share(below)} of the measured windows were less than 1/{FAR} of the noise "
        f"scale; with larger ones from step {start:,} on, the same samples take "
        f"{new_steps:,} steps instead of {steps:,}; this saves time where more devices "
        f"share a window, but no samples"
    )
    return Suggestion({0: accumulate, start: size}, new_steps, why)


def _smaller(
    curve: Sequence[Point],
    above: Sequence[bool],
    ratio: float,
    accumulate: int,
    steps: int,
    most: float,
) -> Suggestion:
    """Smaller windows, up to where they are no longer far above, if they end so."""
    size = max(1, accumulate // 2 ** math.floor(math.log2(1 / ratio)))
    why = (
        f"{_share(above)} of the measured windows were more than {FAR} times the noise "
        f"scale, and a smaller window needs fewer samples"
    )
    if size == accumulate:
        return Suggestion({}, steps, f"{why}: make micro-batches smaller")
    fewer = 1 - (ratio + size / accumulate) / (ratio + 1)
    sizes, new_steps = {0: size}, _steps(steps, accumulate, size, most)
    end = _since(curve, [not each for each in above])
    if end < steps * (1 - LAST_PART):
        start = _steps(end, accumulate, size, most)
        sizes, new_steps = {0: size, start: accumulate}, start + steps - end
    why += (
        f", one of {_counted(size)} in place of {accumulate:,} about "
        f"{100 * fewer:.0f} % fewer for the same progress; the same samples then take "
        f"{new_steps:,} steps instead of {steps:,}"
    )
    return Suggestion(sizes, new_steps, why)


def _steps(steps: int, old: int, new: int, most: float) -> int:
    """The steps for the samples of others, where the last window of an epoch is short.

    >>> _steps(40, 32, 16, 47), _steps(40, 32, 16, math.inf), _steps(41, 1, 8, 47)
    (60, 80, 6)
    """
    if most == math.inf:
        return math.ceil(steps * old / new)
    epochs, rest = divmod(steps, math.ceil(most / old))
    return epochs * math.ceil(most / new) + math.ceil(rest * old / new)


def _since(curve: Sequence[Point], so: Sequence[bool]) -> int:
    """The step after which all measured windows are so; the last, if it is not."""
    others = [each.step for each, is_so in zip(curve, so, strict=True) if not is_so]
    return others[-1] if others else 0


def _counted(size: int) -> str:
    return f"{size:,} micro-batch{'es' * (size != 1)}"


def _share(so: Sequence[bool]) -> str:
    return f"{100 * sum(so) / len(so):.0f} %"
