"""The noise scale in the summary of a run, if `NoiseScale` has measured it."""

from __future__ import annotations

import csv
import shlex
from collections.abc import Mapping
from typing import Any

from trainkit.cli.report import lines
from trainkit.cli.report.rate_plan import unit_of_weights
from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.runs.words_of_run import words_of_run
from trainkit.core.noise.advice import Line, Point, advice, suggest
from trainkit.core.noise.estimate import LEAST_BLOCKS, NoiseEstimate
from trainkit.core.noise.from_run import ADVICE, KEY, NOT_MEASURED
from trainkit.errors import TrainkitError
from trainkit.lit.batch_size.effective import longest_window, own_sizes
from trainkit.lit.callback.base import find_callback, has_callback
from trainkit.lit.logs.metric_file import read_rows
from trainkit.lit.noise.callback import NoiseScale

_OF_PLACE = ("paths.run_dir", "hydra.run.dir")


def facts_of_noise(trainer: Any, folder: RunFolder, *, is_over: bool) -> dict[str, Any]:
    """The two entries of `summary.json`: the estimate, and labels with their lines.

    Args:
        trainer: after `fit`.
        folder: of the run, with its rows.
        is_over: whether it has ended by itself; only then are windows suggested.
    """
    measured = find_callback(trainer, NoiseScale)
    if measured is None:
        return {KEY: None, ADVICE: []}
    estimate = measured.estimate
    if estimate is None:
        return {KEY: None, ADVICE: [("noise scale", _none_since(measured, trainer))]}
    said = advice(estimate, unit_of_weights(trainer))
    if is_over:
        said += _suggested(trainer, folder, estimate)
    return {KEY: estimate.facts(), ADVICE: said}


def _none_since(measured: NoiseScale, trainer: Any) -> str:
    """Why there is no estimate."""
    if measured.why_not:
        return f"{NOT_MEASURED}{measured.why_not}"
    fewest = LEAST_BLOCKS * measured.every_n_steps
    if trainer.global_step < fewest:
        return f"no estimate: it takes {fewest:,} steps or more"
    return "no estimate: too few measured windows had several micro-batches"


def curve(columns: Mapping[str, lines.Line], window: float) -> list[Point]:
    """What was measured over the steps of a run.

    Args:
        columns: of its `metrics.csv`.
        window: the samples of a window where the file does not tell them.
    """
    sizes = lines.window_sizes(columns)
    measured = columns[lines.SCALE].shown if lines.SCALE in columns else ()
    return [Point(int(x), value, sizes.get(x, window)) for x, value in measured]


def _suggested(trainer: Any, folder: RunFolder, estimate: NoiseEstimate) -> list[Line]:
    is_ours = has_callback(
        trainer.callbacks, "AccumulationSchedule", "GradientAccumulationScheduler"
    )
    if is_ours or own_sizes(trainer) or not trainer.is_global_zero:
        return []  # a schedule or the module has chosen the sizes
    try:
        columns = lines.read_lines(read_rows(folder.path / folder.METRICS))
    except (csv.Error, ValueError):  # the report names the damage
        return []
    found = suggest(
        estimate,
        curve(columns, estimate.window),
        accumulate=longest_window(trainer),
        steps=trainer.global_step,
        most=trainer.num_training_batches,
    )
    if found is None:
        return []
    follows = has_callback(trainer.callbacks, "LRScaling") or not found.words
    rate = "" if follows else "; without lr_scaling the rate does not follow the window"
    said = [("suggestion", found.why + rate)]
    if found.words:
        limit = [f"trainer.max_steps={found.steps}"] * (trainer.max_steps != -1)
        words = _repeated(folder, [*found.words, *limit])
        said.append(("to try it", f"trainkit train {shlex.join(words)}"))
    return said


def _repeated(folder: RunFolder, given: list[str]) -> list[str]:
    """The run's own words, with other windows, in a folder of its own."""
    try:
        words = words_of_run(folder, given)
    except TrainkitError:  # they have a secret, which was not saved
        words = ["...", *given]
    return [word for word in words if word.partition("=")[0] not in _OF_PLACE]
