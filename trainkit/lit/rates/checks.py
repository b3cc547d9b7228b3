"""Refusals and warnings about what does not work with scaled learning rates."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from trainkit.core.noise.from_run import read_noise_scale
from trainkit.core.plan.effective_batch import Unit
from trainkit.core.plan.options import is_positive_number
from trainkit.errors import TrainkitError
from trainkit.lit.batch_size.effective import (
    find_effective_batch,
    own_sizes,
    why_unknown,
)
from trainkit.lit.callback.base import find_callback, has_callback
from trainkit.lit.schedule.callback import AccumulationSchedule


def checked_noise_scale(rule: object, noise_scale: object, unit: Unit) -> float | None:
    """The noise scale of the rule `"gain"`, as a number; None for any other rule.

    Raises:
        TrainkitError: the rule and the noise scale do not go together, or the noise
            scale is neither a positive number nor the folder of a run that knows it.
    """
    if rule != "gain":
        if noise_scale is not None:
            raise TrainkitError(
                f"LRScaling noise_scale: belongs to rule='gain', received "
                f"{noise_scale!r} for rule={rule!r}. Write rule='gain', or leave it "
                f"out (null in a configuration)."
            )
        return None
    if unit != "samples":
        raise TrainkitError(
            f"LRScaling unit: must be 'samples' for rule='gain', received {unit!r}. "
            f"The tokens of a sample are alike, so that noise does not fall as one "
            f"over their number. Give reference_batch in samples."
        )
    if isinstance(noise_scale, str | Path):
        return read_noise_scale(Path(noise_scale).expanduser()).samples
    if not is_positive_number(noise_scale):
        raise TrainkitError(
            f"LRScaling noise_scale: must be a positive number of samples for "
            f"rule='gain', or the folder of a run that has measured it, received "
            f"{noise_scale!r}."
        )
    return float(noise_scale)  # type: ignore[arg-type]


def announce_rate_finder(trainer: Any, scaling: Any) -> None:
    """Warn that `lr_find` returns a rate for the present batch, not the reference."""
    if not has_callback(trainer.callbacks, "LearningRateFinder"):
        return
    batch = find_effective_batch(
        trainer, unit=scaling.unit, micro_batch=scaling.micro_batch
    )
    if batch is None or batch.size != scaling.reference_batch:
        size = "" if batch is None else f", {batch.size:g} {scaling.unit}"
        warnings.warn(
            f"LearningRateFinder: it searches with the present batch{size}, and "
            f"LRScaling(reference_batch={scaling.reference_batch:g}) scales the rate "
            f"that it finds again. Give the present batch as reference_batch.",
            stacklevel=2,
        )


def refuse_unmeasured(trainer: Any, unit: Unit) -> None:
    raise TrainkitError(
        f"LRScaling: a window has closed, and nothing says how many {unit} it had: "
        f"{why_unknown(trainer, unit)} Give the number: LRScaling(micro_batch=...)."
    )


def refuse_windows_of_several_sizes(trainer: Any) -> None:
    sizes = sorted(own_sizes(trainer))
    if len(sizes) > 1:
        raise TrainkitError(
            f"LRScaling: one effective batch serves all optimizers, and their windows "
            f"have {sizes} micro-batches (window_ends(every=...)). Give them one size, "
            f"or scale their rates yourself, by self.effective_batch."
        )


def refuse_stages_out_of_reach(trainer: Any, scaling: Any) -> None:
    """Refuse now a later stage of the schedule that the rule cannot follow."""
    schedule = find_callback(trainer, AccumulationSchedule)
    batch = scaling.effective_batch
    if schedule is None or batch is None:
        return
    per_micro_batch = batch.size / batch.accumulate
    for size in set(schedule.stages.sizes):
        for scaled in scaling.scaled:
            scaled.check_reach(per_micro_batch * size / scaling.reference_batch)
