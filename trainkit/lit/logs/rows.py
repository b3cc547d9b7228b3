"""Rows for the loggers: their step, and those whose numbers are still on their way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor

from trainkit.core.checks import LateReading
from trainkit.lit._compat import add_callback_metrics, logged_step
from trainkit.lit.callback.base import find_callback

Numbers = Callable[[Any], Mapping[str, float]]
"""Makes the numbers of a row, by name, of what a reading holds. NaN is left out."""


class StepsDone(int):
    """A number of optimizer steps, which a logger takes as it is."""


class OneStep(Callback):
    """Gives all rows of a training the number of optimizer steps done.

    By itself Lightning logs the first step as 0, validations of a batch by their own
    count, and manual optimization by batches. Here the first step is 1, and what is
    logged after it has its number: the window, its learning rates, and the validation
    that follows. What is logged before the first step has 0. With several optimizers
    the steps of all count, as in `trainer.global_step` and for `max_steps`. A step that
    a gradient scaler skips counts too.

    It is for all loggers of the Trainer, and holds during `fit`.
    """

    ahead = 0
    """1 while rows are logged of the step that an optimizer is about to make."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        for logger in trainer.loggers:
            if "log_metrics" not in vars(logger):
                logger.log_metrics = partial(self._log, logger, trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        for logger in trainer.loggers:
            vars(logger).pop("log_metrics", None)

    def _log(
        self,
        logger: Any,
        trainer: Any,
        metrics: Mapping[str, Any],
        step: int | None = None,
    ) -> None:
        if trainer.state.fn == "fit" and not isinstance(step, StepsDone):
            step = trainer.global_step + self.ahead
        type(logger).log_metrics(logger, metrics, None if step is None else int(step))


def row_step(trainer: Any, lightnings: int | None = None, *, ahead: int = 0) -> int:
    """The step of what is logged now: Lightning's, or with `OneStep` the steps done.

    Args:
        trainer: in `fit`.
        lightnings: the step with which Lightning will log, if it is not the present
            one.
        ahead: 1 if an optimizer is about to make the step.
    """
    if find_callback(trainer, OneStep) is not None:
        return StepsDone(trainer.global_step + ahead)
    return logged_step(trainer) if lightnings is None else lightnings


class LearningRates(LearningRateMonitor):
    """Lightning's `LearningRateMonitor`, for windows of several micro-batches.

    Lightning's logs before each micro-batch; this one once, before the optimizer step,
    with the rates that the step uses. So they are in one row with the step's window.
    """

    def on_train_batch_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Log nothing: the window may not be over."""

    def on_before_optimizer_step(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        numbering = find_callback(trainer, OneStep) or OneStep()
        numbering.ahead = 1
        try:
            super().on_train_batch_start(trainer)
        finally:
            numbering.ahead = 0


class LateNumbers:
    """Calls and rows that wait for numbers on their way from the device; nothing else
    does.

    Args:
        known: the last parts of names in rows that callbacks see by another way.
    """

    def __init__(self, known: Container[str] = ()) -> None:
        self._waiting: deque[tuple[LateReading | None, Callable[[Any], None]]] = deque()
        self._known = known

    def add(self, reading: LateReading | None, then: Callable[[Any], None]) -> None:
        """Call `then` with what arrives, after all that was added before."""
        self._waiting.append((reading, then))

    def add_row(self, trainer: Any, reading: LateReading, numbers: Numbers) -> None:
        """Log the row of the step that an optimizer is about to make, when it is
        known."""
        step = row_step(trainer, ahead=1)
        self.add(reading, partial(self._log, trainer, step, numbers))

    def serve(self, *, wait: bool = False) -> None:
        """Make the calls whose numbers have arrived; `wait` waits for all."""
        while self._waiting:
            reading, then = self._waiting[0]
            if not (wait or reading is None or reading.arrived):
                return
            self._waiting.popleft()
            then(() if reading is None else reading.values())

    def _log(self, trainer: Any, step: int, numbers: Numbers, values: Any) -> None:
        row = {k: value for k, value in numbers(values).items() if value == value}
        rest = {
            name: torch.tensor(value)
            for name, value in row.items()
            if name.rpartition("/")[2] not in self._known
        }
        add_callback_metrics(trainer, rest)
        for logger in trainer.loggers:
            logger.log_metrics(row, step=step)
