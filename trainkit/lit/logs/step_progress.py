"""A progress bar that counts optimizer steps."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import ProgressBar
from rich import progress
from rich.console import Console
from rich.table import Column

from trainkit.core.checks import LateReading
from trainkit.core.plan.options import brief, check_whole_number
from trainkit.errors import TrainkitError
from trainkit.lit._compat import shown_now
from trainkit.lit.callback.base import Stopped, windows_of
from trainkit.lit.logs.rows import LateNumbers
from trainkit.lit.schedule import total_steps

_SECONDS_BETWEEN_UPDATES = 0.2


class StepProgress(ProgressBar):
    """Shows the progress of training in optimizer steps, with the loss of each window.

    Lightning's bars count batches. On a terminal this one draws a bar; without one it
    prints a line every n steps and after validation.

    `window/loss` is the mean loss of the window of this step, over all ranks. The other
    numbers are those that the module logs with `prog_bar=True`, under their own names.
    A line has only numbers of its own step; in the bar the last ones stay.

    With several optimizers the steps of all count, as for `max_steps`.

    Args:
        every_n_steps: how many steps lie between two lines.
    """

    def __init__(self, *, every_n_steps: int = 50) -> None:
        super().__init__()
        check_whole_number("StepProgress every_n_steps", every_n_steps)
        self.every_n_steps = every_n_steps
        self.is_enabled = True  # `LightningModule.print` asks for it
        self._bar: StepBar | None = None
        self._begin(0, None)

    def _begin(self, step: int, total: int | None) -> None:
        self._total, self._last_step, self._said_step = total, step, step
        self._late = LateNumbers()
        self._last_update = 0.0

    def enable(self) -> None:
        self.is_enabled = True

    def disable(self) -> None:
        self.is_enabled = False

    # ---- training --------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._begin(trainer.global_step, _end_of(trainer))
        if self.is_enabled and _is_terminal():
            self._bar = StepBar(self._total)
            self._bar.draw(self._last_step, [])

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        step, before = trainer.global_step, self._last_step
        if self.is_enabled:
            self._last_step = step
            if step != before and self._is_due(step, before):
                self._add(trainer, self._shown(trainer), is_line=True)
            self._late.serve()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        is_within = trainer.state.fn == "fit" and not trainer.sanity_checking
        if self.is_enabled and is_within:
            self._add(trainer, self._shown(trainer))
            self._late.serve(wait=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._bar is not None:
            self._add(trainer, self._shown(trainer))
        self._late.serve(wait=True)
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

    def _shown(self, trainer: Any) -> dict[str, float]:
        """What the module shows beside a bar; for a line, of this step alone."""
        return shown_now(trainer) if self._bar is None else trainer.progress_bar_metrics

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
        windows, step = windows_of(trainer), self._last_step
        is_new = self._bar is not None or step != self._said_step
        closed = windows.windows if windows is not None and is_new else {}
        several = len(closed) > 1
        names = [f"window/{i}/loss" if several else "window/loss" for i in closed]
        losses = [stats.loss for stats in closed.values()]
        self._said_step = step
        if self._bar is not None or is_line or losses or found:
            reading = LateReading(torch.stack(losses)) if losses else None
            self._late.add(reading, partial(self._show, step, names, found))

    def _show(
        self, step: int, names: list[str], found: dict[str, float], losses: Any
    ) -> None:
        shown = dict(zip(names, losses, strict=True)) | found
        texts = [f"{name} {number:.4g}" for name, number in shown.items()]
        if self._bar is not None:
            self._bar.draw(self._last_step, texts)
            return
        of = "" if self._total is None else f" of {brief(self._total)}"
        numbers = f": {', '.join(texts)}" if texts else ""
        print(f"trainkit | step {brief(step)}{of}{numbers}", flush=True)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class StepBar:
    """Steps, numbers and times beside a bar, as wide as the terminal is.

    While it is drawn, what is printed appears above it.

    Args:
        total: how many steps there will be; None if that is not known.
    """

    def __init__(self, total: int | None) -> None:
        whole = Column(no_wrap=True)
        in_lines = Column(overflow="fold")  # as many as the numbers need; none is cut
        self._progress = progress.Progress(
            progress.TextColumn("[bold]step"),
            progress.BarColumn(bar_width=20),
            progress.MofNCompleteColumn(table_column=whole),
            progress.TextColumn("{task.fields[numbers]}", table_column=in_lines),
            progress.TimeElapsedColumn(table_column=whole),
            progress.TextColumn("<"),
            progress.TimeRemainingColumn(table_column=whole),
            console=Console(),
        )
        self._task = self._progress.add_task("train", total=total, numbers="")
        self._progress.start()

    def draw(self, step: int, numbers: list[str]) -> None:
        """Show a step and texts such as `window/loss 0.25`."""
        self._progress.update(self._task, completed=step, numbers=", ".join(numbers))

    def close(self) -> None:
        """Leave the bar as it is."""
        self._progress.stop()


def _is_terminal() -> bool:
    """Whether the standard output is a terminal; there may be none at all."""
    isatty = getattr(sys.stdout, "isatty", None)
    return isatty is not None and isatty()


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
