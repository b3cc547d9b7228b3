"""A monitor that logs the learning rates once for each optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import Logger

from trainkit.lit.callback.base import windows_of
from trainkit.lit.logs.rows import row_step


class LearningRates(LearningRateMonitor):
    """Lightning's `LearningRateMonitor`, for windows of several micro-batches.

    Lightning's logs before each micro-batch; this one once, after the optimizer step,
    with the rates that the step used. So they are in one row with the step's window.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rates: dict[str, float] = {}
        self._steps = 0

    def on_train_batch_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        windows = windows_of(trainer)
        is_open = windows is not None and any(
            accumulator.is_open for accumulator in windows.accumulators.values()
        )
        if not is_open:
            loggers, reader = trainer.loggers, _Reader()
            trainer.loggers = [reader]
            try:
                super().on_train_batch_start(trainer, *args, **kwargs)
            finally:
                trainer.loggers = loggers
            self._rates, self._steps = reader.found, trainer.global_step

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step != self._steps:
            for logger in trainer.loggers if self._rates else ():
                logger.log_metrics(self._rates, step=row_step(trainer))
            self._rates, self._steps = {}, trainer.global_step

    def state_dict(self) -> dict[str, Any]:
        return {"rates": self._rates, "steps": self._steps}  # of an open window

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._rates, self._steps = state_dict["rates"], state_dict["steps"]


class _Reader(Logger):
    """Takes what Lightning's monitor would log."""

    name = version = ""  # type: ignore[assignment]  # properties in Logger

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, float] = {}

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self.found.update(metrics)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...
