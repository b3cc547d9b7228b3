"""The meaning of a noise scale for windows, and the one that a run has measured."""

from __future__ import annotations

import json
import os
from pathlib import Path

from trainkit.core.noise.estimate import NoiseEstimate
from trainkit.errors import TrainkitError

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


SUMMARY = "summary.json"
KEY, ADVICE = "noise_scale", "advice"
"""The entries of `summary.json`: the facts of the estimate, and lines to read."""
NOT_MEASURED = "not measured: "
"""So begins the line of a run that has said before why it measures nothing."""


def read_noise_scale(path: str | os.PathLike[str]) -> NoiseEstimate:
    """The noise scale of the run in a folder, which knows it from both sides.

    Raises:
        TrainkitError: there is no such run, or it has measured none, or no upper end.
    """
    why = "it has measured none"
    try:
        summary = json.loads((Path(path) / SUMMARY).read_text(encoding="utf-8"))
        facts = summary.get(KEY)
        if facts is not None:
            found = NoiseEstimate.of_facts(facts)
            why = f"after {found.num_windows:,} windows it knows at least {found.low:g}"
            if 0 <= found.low <= found.samples > 0 and found.is_bounded:
                return found
    except (OSError, ValueError, TypeError, AttributeError) as error:
        why = str(error)
    raise TrainkitError(
        f"noise_scale: must be a positive number or the folder of a run that has ended "
        f"and measured it, with both ends of its interval, received {str(path)!r}: "
        f"{why}. Train with callbacks=[NoiseScale()], in windows of several "
        f"micro-batches, or write a number."
    )
