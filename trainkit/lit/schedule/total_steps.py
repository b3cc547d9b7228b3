"""The number of optimizer steps in a training, with or without a schedule."""

from __future__ import annotations

from typing import Any

from trainkit.lit.callback.base import find_callback
from trainkit.lit.schedule.callback import AccumulationSchedule


def total_steps(trainer: Any) -> float:
    """All optimizer steps of a `fit`, or infinity.

    Args:
        trainer: in `fit`; in `configure_optimizers` already.

    Raises:
        TrainkitError: a schedule in tokens cannot tell before tokens are known.
    """
    schedule = find_callback(trainer, AccumulationSchedule)
    if schedule is not None:
        return schedule.total_steps(trainer)
    return trainer.estimated_stepping_batches
