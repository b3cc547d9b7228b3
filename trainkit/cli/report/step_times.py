"""Writes down how long each optimizer step took."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback

from trainkit.cli.report.throughput import STEP_TIMES
from trainkit.cli.runs.folder import RunFolder

_EVERY = 1.0
"""How many seconds pass at least between two writes."""


class StepTimes(Callback):
    """Writes `step_times.csv`: the seconds from one optimizer step to the next.

    Steps are numbered as in `trainer.global_step`: 1 is the first. The seconds are the
    host's time, so nothing waits for a device. The time of a validation is left out.
    What came before the first step of a process is not known, and written as nan. A
    resumed run writes some steps again; the later line counts.

    The times are not in `metrics.csv`, whose rows a resumed run repeats exactly.

    Args:
        folder: the folder of the run.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._file = folder.path / STEP_TIMES
        self._lines: list[str] = []
        self._step = -1
        self._since = self._paused = self._written = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._step, self._since = trainer.global_step, float("nan")

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, now = trainer.global_step, time.perf_counter()
        is_told = trainer.is_global_zero and trainer.loggers
        if step == self._step or trainer.fast_dev_run or not is_told:
            return
        self._lines.append(f"{step},{now - self._since:.6g}\n")
        self._step, self._since = step, now
        if now - self._written > _EVERY:
            self._write()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._paused = time.perf_counter()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._since += time.perf_counter() - self._paused

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._write()

    def on_exception(self, trainer: Any, pl_module: Any, exception: Any) -> None:
        self._write()

    def _write(self) -> None:
        self._written = time.perf_counter()
        lines, self._lines = self._lines, []
        if not lines:
            return
        try:
            is_new = not self._file.exists()
            with self._file.open("a", encoding="utf-8") as file:
                file.write("step,seconds\n" * is_new + "".join(lines))
        except OSError as error:  # a training must not fail because of its report
            print(f"trainkit | report: no throughput: {error}", flush=True)
