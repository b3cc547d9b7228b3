"""The optimizer's own step: a step that no window has divided is refused; one that a
gradient scaler skips is counted, and holds schedulers where they are.

While `fit` runs under a gradient scaler, a module whose schedulers are to be held has
an `lr_scheduler_step` that asks the window callback. That is put there once Lightning
has looked at the schedulers: it takes a module with a hook of its own to know how they
step.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from trainkit.core.accumulator import Accumulator
from trainkit.errors import TrainkitError
from trainkit.lit._compat import unscales_itself
from trainkit.lit.callback.base import windows_of

STEP = "lr_scheduler_step"


class StepWatch:
    """Knows whether a window's step was skipped, and refuses undivided steps.

    A gradient scaler that finds an infinity skips the step, and its factor falls: that
    is counted on the device, unless torch's public hooks have seen the step. They also
    show undivided steps.
    """

    def __init__(self, optimizer: Any, accumulator: Accumulator, scaler: Any) -> None:
        self._accumulator: Accumulator | None = accumulator
        self._scaler: Any = scaler
        self._device = next(
            (p.device for group in optimizer.param_groups for p in group["params"]),
            torch.device("cpu"),
        )
        self._unscales_itself = unscales_itself(optimizer)
        self._factor_before: Tensor | None = None
        self._fell: Tensor | None = None
        self._times_fallen: Tensor | int = 0
        try:
            self._hooks = [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ]
        except AttributeError:  # no torch.optim.Optimizer, or its __init__ did not run
            self._hooks = []

    @property
    def num_skipped(self) -> int:
        """Steps skipped so far; waits for the device."""
        return int(self._times_fallen)

    @property
    def skipped_last(self) -> bool:
        """Whether the step of the window that closed last was skipped; waits for the
        device."""
        self.count_step()
        return self._fell is not None and bool(self._fell)

    def expect_step(self) -> None:
        """Note that a window closes under a scaler, so that its step should follow."""
        self._factor_before = self._factor()

    def count_step(self) -> None:
        """Count the step that was expected, if it was skipped, once it is over."""
        if self._factor_before is not None:
            self._fell = self._factor() < self._factor_before
            self._times_fallen = self._times_fallen + self._fell.long()
            self._factor_before = None

    def close(self) -> None:
        """Release all but the numbers, when training is over."""
        self.count_step()
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._accumulator = [], None
        self._scaler = None

    def _factor(self) -> Tensor:
        return self._scaler.scale(torch.ones((), device=self._device))

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        _, closure, *_ = *args, kwargs.get("closure")  # the optimizer comes first
        if closure is None:
            self._refuse_undivided(optimizer)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._refuse_undivided(optimizer)  # its closure ran a backward pass
        if not self._unscales_itself:
            self._fell = self._factor_before = None  # it was taken

    def _refuse_undivided(self, optimizer: Any) -> None:
        assert self._accumulator is not None
        if self._accumulator.window.is_open:
            raise TrainkitError(
                f"{type(optimizer).__name__}.step(): its window of "
                f"{self._accumulator.num_micro_batches} micro-batches has not been "
                f"divided, since on_before_optimizer_step did not run. In "
                f"optimizer_step, call optimizer.step(closure=optimizer_closure) on "
                f"the optimizer that Lightning passes, and leave trainkit's callback "
                f"in trainer.callbacks."
            )


def hold_schedulers(module: Any) -> None:
    """Let the schedulers of a module ask before they step."""
    own = vars(module).get(STEP)
    # A partial, since it can be sent and copied along with the module.
    setattr(module, STEP, partial(_step_unless_held, module, own))


def release_schedulers(module: Any) -> None:
    """Give the module its own hook back, if it was replaced."""
    found = vars(module).get(STEP)
    if isinstance(found, partial) and found.func is _step_unless_held:
        delattr(module, STEP)
        if (own := found.args[1]) is not None:
            setattr(module, STEP, own)


def _step_unless_held(module: Any, own: Any, scheduler: Any, metric: Any) -> None:
    windows: Any = windows_of(module.trainer)  # none under lr_find
    by_step = any(
        config.scheduler is scheduler and config.interval == "step"
        for config in module.trainer.lr_scheduler_configs
    )
    if windows is not None and by_step and windows.skipped_last_step():
        return
    step = MethodType(type(module).lr_scheduler_step, module) if own is None else own
    step(scheduler, metric)
