"""A progress bar that counts optimizer steps."""

from __future__ import annotations

import sys
import time
from typing import Any

from lightning.pytorch.callbacks import ProgressBar

from trainkit.core.effective import brief
from trainkit.core.late_reading import LateReading
from trainkit.core.whole_number import check_whole_number
from trainkit.errors import TrainkitError
from trainkit.lit.callback.base import windows_of
from trainkit.lit.schedule.total_steps import total_steps

_SECONDS_BETWEEN_UPDATES = 0.2


class StepProgress(ProgressBar):
    """Shows the progress of training in optimizer steps, with the loss of each window.

    In a terminal it is a bar. Elsewhere it is a line after every `every_n_steps` and
    after each validation. Lightning's own bars count micro-batches, and show the loss
    of one. With several optimizers the steps of all count, as for `max_steps`.

    Args:
        every_n_steps: how many steps lie between two lines.
    """

    def __init__(self, *, every_n_steps: int = 50) -> None:
        super().__init__()
        check_whole_number("StepProgress every_n_steps", every_n_steps)
        self.every_n_steps = every_n_steps
        self._is_enabled = True
        self._bar: Any = None
        self._forget()

    def _forget(self) -> None:
        self._loss: LateReading | None = None
        self._shown: dict[str, str] = {}
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

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self._bar is not None:
            self._bar.console.print(*args, **{"markup": False, **kwargs})
        else:
            print(*args, **kwargs)

    # ---- training --------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._forget()
        self._total = _end_of(trainer)
        self._last_step = trainer.global_step
        self._open()
        self._draw(self._last_step)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, before = trainer.global_step, self._last_step
        if not self._is_enabled or step == before:
            return
        self._last_step = step
        if self._bar is None:
            # One batch may make several steps, of several optimizers.
            if step // self.every_n_steps > before // self.every_n_steps:
                self._read_loss(trainer)
                self._print_line(step)
        elif time.monotonic() - self._last_update > _SECONDS_BETWEEN_UPDATES:
            self._last_update = time.monotonic()
            self._read_loss(trainer)
            self._draw(step)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not self._is_enabled or trainer.sanity_checking:
            return
        for name, value in trainer.progress_bar_metrics.items():
            self._shown[name] = f"{value:.4g}"
        self._read_loss(trainer)
        if self._bar is not None:
            self._draw(self._last_step)
        elif trainer.state.fn == "fit":
            self._print_line(self._last_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._read_loss(trainer)
        self._draw(self._last_step)
        self._close()

    def on_exception(
        self, trainer: Any, pl_module: Any, exception: BaseException
    ) -> None:
        self._close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._close()

    # ---- showing ---------------------------------------------------------------------

    def _read_loss(self, trainer: Any) -> None:
        """Start to copy the last window's loss, and take the loss that has arrived.

        On a GPU that is the loss of an earlier call, so that nothing waits.
        """
        windows = windows_of(trainer)
        stats = None if windows is None else windows.windows.get(0)
        if self._loss is None and stats is not None:
            self._loss = LateReading(stats.loss.reshape(1))
        # Only the first line waits, or it would show no number.
        is_needed = self._bar is None and not self._shown
        if self._loss is not None and (is_needed or self._loss.arrived):
            (loss,) = self._loss.values()
            self._shown["loss"] = f"{loss:.4g}"
            self._loss = None

    def _open(self) -> None:
        isatty = getattr(sys.stdout, "isatty", None)
        if not self._is_enabled or isatty is None or not isatty():
            return
        from rich import progress

        self._bar = progress.Progress(
            progress.TextColumn("[bold]step"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[numbers]}"),
            progress.TimeElapsedColumn(),
            progress.TextColumn("<"),
            progress.TimeRemainingColumn(),
        )
        self._bar.add_task("train", total=self._total, numbers="")
        self._bar.start()

    def _draw(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(
                self._bar.task_ids[0], completed=step, numbers=self._numbers()
            )

    def _print_line(self, step: int) -> None:
        of = "" if self._total is None else f" of {brief(self._total)}"
        numbers = self._numbers() or "no number is known yet"
        print(f"trainkit | step {brief(step)}{of}: {numbers}", flush=True)

    def _numbers(self) -> str:
        return ", ".join(f"{name} {text}" for name, text in self._shown.items())

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


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
