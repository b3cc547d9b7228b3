"""The noise scale in the summary of a run, if `NoiseScale` has measured it."""

from __future__ import annotations

from typing import Any

from trainkit.cli.report.rate_plan import unit_of_weights
from trainkit.core.noise.advice import advice
from trainkit.core.noise.estimate import LEAST_BLOCKS
from trainkit.core.noise.from_run import ADVICE, KEY, NOT_MEASURED
from trainkit.lit.callback.base import find_callback
from trainkit.lit.noise.callback import NoiseScale


def facts_of_noise(trainer: Any) -> dict[str, Any]:
    """The two entries of `summary.json`: the estimate, and labels with their lines.

    Args:
        trainer: after `fit`.
    """
    measured = find_callback(trainer, NoiseScale)
    if measured is None:
        return {KEY: None, ADVICE: []}
    estimate = measured.estimate
    if estimate is None:
        return {KEY: None, ADVICE: [("noise scale", _none_since(measured, trainer))]}
    return {KEY: estimate.facts(), ADVICE: advice(estimate, unit_of_weights(trainer))}


def _none_since(measured: NoiseScale, trainer: Any) -> str:
    """Why there is no estimate."""
    if measured.why_not:
        return f"{NOT_MEASURED}{measured.why_not}"
    fewest = LEAST_BLOCKS * measured.every_n_steps
    if trainer.global_step < fewest:
        return f"no estimate: it takes {fewest:,} steps or more"
    return "no estimate: too few measured windows had several micro-batches"
