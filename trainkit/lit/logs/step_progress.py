"""A progress bar that counts optimizer steps."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import ProgressBar

from trainkit.core.checks import LateReading
from trainkit.core.plan.options import brief, check_whole_number
from trainkit.core.window import WindowStats
from trainkit.errors import TrainkitError
from trainkit.lit._compat import shown_now
from trainkit.lit.callback.base import Stopped, windows_of
from trainkit.lit.callback.table import is_terminal
from trainkit.lit.schedule.callback import total_steps

if TYPE_CHECKING:
    from trainkit.lit.logs.step_bar import StepBar

_SECONDS_BETWEEN_UPDATES = 0.2

_Waiting = tuple[int, list[str], LateReading | None, dict[str, float]]
"""A step, the names of losses, their values on the way, and numbers that are known."""


class StepProgress(ProgressBar):
    """Shows the progress of training in optimizer steps, with the loss of each window.

    Lightning's bars count batches. On a terminal this one draws a bar; without one it
    prints a line every n steps and after validation.

    `window/loss` is the mean loss of the window of this step, over all ranks. The other
    numbers are those that the module logs with `prog_bar=True`, under their own names,
    and of a validation those that a checkpoint or an early stop monitors.
    A line has only numbers of its own step; in the bar, those of the last validation
    stay, with their step.

    With several optimizers the steps of all count, as for `max_steps`.

    Args:
        every_n_steps: how many steps lie between two lines.
    """

    def __init__(self, *, every_n_steps: int = 50) -> None:
        super().__init__()
        check_whole_number("StepProgress every_n_steps", every_n_steps)
        self.every_n_steps = every_n_steps
        self._is_enabled = True
        self._bar: StepBar | None = None
        self._forget()

    def _forget(self) -> None:
        self._waiting: deque[_Waiting] = deque()
        self._read: dict[int, WindowStats] = {}
        self._validated: dict[str, str] = {}
        self._validated_at = 0
        self._last_update = 0.0
        self._last_step = 0
        self._total: int | None = None

    @property
    def is_enabled(self) -> bool:
        """Whether it shows something; `LightningModule.print` asks for it."""
        return self._is_enabled

    def enable(self) -> None:
        self._is_enabled = True

    def disable(self) -> None:
        self._is_enabled = False

    # ---- training --------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._forget()
        self._total = _end_of(trainer)
        self._last_step = trainer.global_step
        if self._is_enabled and is_terminal():
            from trainkit.lit.logs.step_bar import StepBar

            self._bar = StepBar(self._total)
            self._bar.draw(self._last_step, [])

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, before = trainer.global_step, self._last_step
        if not self._is_enabled:
            return
        self._last_step = step
        if step != before and self._is_due(step, before):
            self._add(trainer, shown_now(trainer), is_line=True)
        self._show_arrived()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        is_within = trainer.state.fn == "fit" and not trainer.sanity_checking
        if not self._is_enabled or not is_within:
            return
        found = _monitored(trainer) | shown_now(trainer)
        if self._bar is not None:
            self._validated, self._validated_at = _texts(found), self._last_step
            found = {}
        self._add(trainer, found)
        self._show_arrived(wait=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._bar is not None:
            self._add(trainer, {})
        self._show_arrived(wait=True)
        self._close()

    def on_exception(
        self, trainer: Any, pl_module: Any, exception: BaseException
    ) -> None:
        if isinstance(exception, Stopped):
            self.on_train_end(trainer, pl_module)
        self._close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._close()

    # ---- showing ---------------------------------------------------------------------

    def _is_due(self, step: int, before: int) -> bool:
        """Whether numbers are shown at this step, after the steps before it."""
        if self._bar is None:
            # One batch may make several steps, of several optimizers.
            return step // self.every_n_steps > before // self.every_n_steps
        now = time.monotonic()
        if now - self._last_update < _SECONDS_BETWEEN_UPDATES:
            return False
        self._last_update = now
        return True

    def _add(
        self, trainer: Any, found: dict[str, float], *, is_line: bool = False
    ) -> None:
        """Begin to read the losses of the last windows; on a GPU nothing waits.

        What a line has said, the next does not repeat; an empty one is left out.
        """
        windows = windows_of(trainer)
        closed = {} if windows is None else windows.windows
        several = len(closed) > 1
        losses = {
            f"window/{index}/loss" if several else "window/loss": stats.loss
            for index, stats in closed.items()
            if self._bar is not None or stats is not self._read.get(index)
        }
        self._read = dict(closed)
        reading = LateReading(torch.stack([*losses.values()])) if losses else None
        if self._bar is not None or is_line or losses or found:
            self._waiting.append((self._last_step, list(losses), reading, found))

    def _show_arrived(self, *, wait: bool = False) -> None:
        while self._waiting:
            step, names, reading, found = self._waiting[0]
            if not (wait or reading is None or reading.arrived):
                return
            self._waiting.popleft()
            losses = [] if reading is None else reading.values()
            numbers = _texts(dict(zip(names, losses, strict=True)) | found)
            self._show(step, [f"{name} {text}" for name, text in numbers.items()])

    def _show(self, step: int, texts: list[str]) -> None:
        if self._bar is not None:
            is_old = self._validated_at != self._last_step
            at = f" at step {brief(self._validated_at)}" if is_old else ""
            texts += [f"{name} {text}{at}" for name, text in self._validated.items()]
            self._bar.draw(self._last_step, texts)
            return
        of = "" if self._total is None else f" of {brief(self._total)}"
        numbers = f": {', '.join(texts)}" if texts else ""
        print(f"trainkit | step {brief(step)}{of}{numbers}", flush=True)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _texts(numbers: dict[str, float]) -> dict[str, str]:
    return {name: f"{number:.4g}" for name, number in numbers.items()}


def _monitored(trainer: Any) -> dict[str, float]:
    """What a checkpoint or an early stop reads of the validation that has ended."""
    watching = [*trainer.checkpoint_callbacks, *trainer.early_stopping_callbacks]
    names = {getattr(each, "monitor", None) for each in watching}
    found = shown_now(trainer, to="callback").items()
    return {name: float(value) for name, value in found if name in names}


def _end_of(trainer: Any) -> int | None:
    """Optimizer steps of the whole training; None if the number is not known."""
    if len(trainer.optimizers) > 1:
        # The steps of all count, and each may step at times of its own.
        return trainer.max_steps if trainer.max_steps > 0 else None
    try:
        steps = total_steps(trainer)
    except TrainkitError:
        return None
    return None if steps == float("inf") else int(steps)
