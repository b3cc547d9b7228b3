"""One `step` for all rows of a training: the optimizer steps done."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from lightning.pytorch import Callback

from trainkit.lit._compat import logged_step


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

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        for logger in trainer.loggers:
            if "log_metrics" not in vars(logger):
                logger.log_metrics = partial(_log, logger, trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        for logger in trainer.loggers:
            vars(logger).pop("log_metrics", None)


def row_step(trainer: Any, lightnings: int | None = None) -> int:
    """The step of what is logged now: Lightning's, or with `OneStep` the steps done.

    Args:
        trainer: in `fit`.
        lightnings: the step with which Lightning will log, if it is not the present
            one.
    """
    if any(isinstance(each, OneStep) for each in trainer.callbacks):
        return StepsDone(trainer.global_step)
    return logged_step(trainer) if lightnings is None else lightnings


def _log(
    logger: Any, trainer: Any, metrics: Mapping[str, Any], step: int | None = None
) -> None:
    if trainer.state.fn == "fit" and not isinstance(step, StepsDone):
        step = trainer.global_step
    type(logger).log_metrics(logger, metrics, None if step is None else int(step))
