"""Schedulers that stay where they are when a gradient scaler skips a step."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from types import MethodType
from typing import Any

from trainkit.lit.callback.base import windows_of
from trainkit.lit.split.callback import SplitCallback

STEP = "lr_scheduler_step"


class SchedulerHolder(SplitCallback):
    """A window callback that can hold the schedulers of its module.

    While `fit` runs under a gradient scaler, the module has an `lr_scheduler_step` that
    asks it. That is put there once Lightning has looked at the schedulers: it takes a
    module with a hook of its own to know how they step.
    """

    @abstractmethod
    def holds_schedulers(self, pl_module: Any) -> bool:
        """Whether the schedulers hold their place after a skipped step."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        release_schedulers(pl_module)  # a copy that was made within a fit
        super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        if self._scaler is not None:
            own = vars(pl_module).get(STEP)
            # A partial, since it can be sent and copied along with the module.
            setattr(pl_module, STEP, partial(_step_unless_held, pl_module, own))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_end(trainer, pl_module)
        release_schedulers(pl_module)

    def on_exception(
        self, trainer: Any, pl_module: Any, exception: BaseException
    ) -> None:
        super().on_exception(trainer, pl_module, exception)
        release_schedulers(pl_module)


def release_schedulers(module: Any) -> None:
    """Give the module its own hook back, if it was replaced."""
    found = vars(module).get(STEP)
    if not isinstance(found, partial) or found.func is not _step_unless_held:
        return
    _, own = found.args
    if own is None:
        delattr(module, STEP)
    else:
        setattr(module, STEP, own)


def _step_unless_held(module: Any, own: Any, scheduler: Any, metric: Any) -> None:
    if _is_held(module, scheduler):
        return
    step = MethodType(type(module).lr_scheduler_step, module) if own is None else own
    step(scheduler, metric)


def _is_held(module: Any, scheduler: Any) -> bool:
    windows = windows_of(module.trainer)  # none under lr_find
    if not isinstance(windows, SchedulerHolder):
        return False
    by_step = any(
        config.scheduler is scheduler and config.interval == "step"
        for config in module.trainer.lr_scheduler_configs
    )
    return by_step and windows.holds_schedulers(module) and windows.skipped_last_step()
