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
    """The noise scale of the run in a folder, which has an upper end.

    Raises:
        TrainkitError: there is no such folder, it has no summary, the run has measured
            none, or its interval has no upper end.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise TrainkitError(
            f"noise_scale: must be a positive number or the folder of a run, received "
            f"{str(path)!r}, and there is no such folder."
        )
    file = folder / SUMMARY
    if not file.is_file():
        raise TrainkitError(
            f"noise_scale: {folder} must be the folder of a run that has ended, and it "
            f"has no {SUMMARY}. Name the folder that the run's last line names, or let "
            f"the run end."
        )
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
        facts = summary.get(KEY)
        said = " ".join(text for _, text in summary.get(ADVICE) or ()).rstrip(".")
        estimate = None if facts is None else NoiseEstimate.of_facts(facts)
        if estimate is not None and not 0 <= estimate.low <= estimate.samples:
            raise ValueError(f"{KEY} is {facts}")
    except (ValueError, TypeError, AttributeError) as error:
        raise TrainkitError(
            f"noise_scale: {file} must be JSON, as a run writes it at its end, and is "
            f"damaged: {error}. Name another run, or write its number."
        ) from error
    if estimate is None:
        why = f" It says: {said}." if said else ""
        raise TrainkitError(
            f"noise_scale: the run in {folder} has measured none.{why} Train with "
            f"callbacks=[NoiseScale()], in windows of several micro-batches."
        )
    if not (estimate.is_bounded and estimate.samples > 0):
        least = f"at least {estimate.low:,.3g} samples"
        raise TrainkitError(
            f"noise_scale: the run in {folder} must know its noise scale from both "
            f"sides, and after {estimate.num_windows:,} windows it knows "
            f"{'that of 0' if estimate.is_bounded else least}. Measure more windows, "
            f"or write a number."
        )
    return estimate
