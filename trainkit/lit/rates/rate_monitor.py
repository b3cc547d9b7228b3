"""A monitor that logs the learning rates once for each optimizer step."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import LearningRateMonitor

from trainkit.lit.callback.base import windows_of


class LearningRates(LearningRateMonitor):
    """Lightning's `LearningRateMonitor`, for windows of several micro-batches.

    Lightning's logs again with every micro-batch of a step; this one only with the
    first.
    """

    def on_train_batch_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        windows = windows_of(trainer)
        is_open = windows is not None and any(
            accumulator.is_open for accumulator in windows.accumulators.values()
        )
        if not is_open:
            super().on_train_batch_start(trainer, *args, **kwargs)
