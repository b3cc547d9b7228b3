"""Where a window ends: with a step, or dropped."""

from __future__ import annotations

import warnings
from typing import Any


def window_ends(trainer: Any, batch_idx: int, num_expected: int) -> bool:
    """Whether the window closes with this batch: it is full, or the epoch is over."""
    return (
        (batch_idx + 1) % num_expected == 0
        or trainer.is_last_batch
        or batch_idx + 1 == trainer.num_training_batches
    )


def say_dropped(held: int, why: str) -> None:
    warnings.warn(
        f"accumulation: an open window of {held} micro-batch{'es' * (held != 1)} was "
        f"dropped, since {why}; no optimizer step was taken with it.",
        stacklevel=3,
    )
