"""Schedulers that stay where they are when a gradient scaler skips a step.

While `fit` runs under a gradient scaler, the module has an `lr_scheduler_step` that
asks the window callback. That is put there once Lightning has looked at the schedulers:
it takes a module with a hook of its own to know how they step.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

from trainkit.lit.callback.base import windows_of

STEP = "lr_scheduler_step"


def hold_schedulers(module: Any) -> None:
    """Let the schedulers of a module ask before they step."""
    own = vars(module).get(STEP)
    # A partial, since it can be sent and copied along with the module.
    setattr(module, STEP, partial(_step_unless_held, module, own))


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
    windows: Any = windows_of(module.trainer)  # none under lr_find
    if windows is None:
        return False
    by_step = any(
        config.scheduler is scheduler and config.interval == "step"
        for config in module.trainer.lr_scheduler_configs
    )
    return by_step and windows.holds_schedulers(module) and windows.skipped_last_step()
