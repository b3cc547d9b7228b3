"""The noise scale that an earlier run has measured, from its `summary.json`."""

from __future__ import annotations

import json
import os
from pathlib import Path

from trainkit.core.noise.estimate import NoiseEstimate
from trainkit.errors import TrainkitError

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
