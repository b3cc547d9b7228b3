"""Writes down how long each optimizer step took, and what it trained on."""

from __future__ import annotations

import csv
import math
from collections import deque
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import Callback

from trainkit.cli.report.run import COLUMNS, STEP_TIMES
from trainkit.cli.runs.folder import RunFolder
from trainkit.core.checks import LateReading
from trainkit.core.window import NUM_COLUMNS, PADDING, SAMPLES, TOKENS
from trainkit.lit._compat import replaced
from trainkit.lit.callback.base import windows_of

_EVERY = 1.0
"""How many seconds pass at least between two writes."""
_FETCH = ".train_dataloader_next"
"""The end of the name under which Lightning profiles the wait for a batch."""
_UNKNOWN = torch.full([NUM_COLUMNS], math.nan)


class StepTimes(Callback):
    """Writes `step_times.csv`: the seconds from one optimizer step to the next.

    Steps are numbered as in `trainer.global_step`: 1 is the first. The seconds are the
    first rank's time, without validations, checkpoints and what Lightning does beside
    them. What came before the first step of a process is not known, and written as nan.
    A resumed run writes some steps again; the later line counts.

    Samples and tokens are those of the windows, of all ranks; with several optimizers,
    of the first one's. They are added up on the device anyway, and the sums are read
    when they have arrived: nothing waits for the device before the end, whose wait
    belongs to the last step. `WindowMonitor` counts tokens; without it there are none.

    The times are not in `metrics.csv`, whose rows a resumed run repeats exactly.

    Args:
        folder: the folder of the run.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._listening = ExitStack()
        self._step, self._since = -1, math.nan
        self._batch_end = self._fetch_start = self._written = 0.0
        self._aside = self._waited = 0.0
        self._is_aside = False
        self._late: deque[tuple[list[float], bool, LateReading]] = deque()
        self._before = [math.nan] * NUM_COLUMNS

    def __getstate__(self) -> dict[str, Any]:
        return vars(type(self)(self._folder))  # a copy begins anew

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        vars(self).update(self.__getstate__())
        self._step = trainer.global_step
        windows = windows_of(trainer)
        if windows is not None:
            windows.counts_samples = True
        profiler = trainer.profiler
        start = partial(self._on_start, profiler.start)
        stop = partial(self._on_stop, profiler.stop)
        self._listening.enter_context(replaced(profiler, start=start, stop=stop))

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, now = trainer.global_step, perf_counter()
        self._batch_end, self._is_aside = now, False
        if step == self._step or trainer.fast_dev_run or not trainer.is_global_zero:
            return
        windows = windows_of(trainer)
        account = None if windows is None else windows.ledger.of()
        times = [step, now - self._since - self._aside, self._waited]
        is_counted = account is None or account.counts_samples
        reading = LateReading(_UNKNOWN if account is None else account.sums)
        self._late.append((times, is_counted, reading))
        self._step, self._since = step, now
        self._aside = self._waited = 0.0
        if now - self._written > _EVERY:
            self._write()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._is_aside = True

    def on_save_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        self._is_aside = True

    def on_exception(self, trainer: Any, pl_module: Any, exception: Any) -> None:
        self._end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._end()

    def _on_start(self, profile: Any, action: str) -> None:
        if action.endswith(_FETCH):
            self._fetch_start = perf_counter()
            if self._is_aside:  # leave out the time since the last batch
                self._aside += self._fetch_start - self._batch_end
            self._is_aside = False
        profile(action)

    def _on_stop(self, profile: Any, action: str) -> None:
        profile(action)
        if action.endswith(_FETCH):
            self._waited += perf_counter() - self._fetch_start

    def _end(self) -> None:
        self._listening.close()
        self._write(is_end=True)

    def _write(self, *, is_end: bool = False) -> None:
        """Write the steps whose sums have arrived; the end waits for all."""
        self._written = perf_counter()
        rows = []
        try:
            while self._late and (is_end or self._late[0][2].arrived):
                (step, *times), is_counted, reading = self._late.popleft()
                sums = reading.values()
                if is_end and not self._late:
                    times[0] += perf_counter() - self._written
                new = [now - then for now, then in zip(sums, self._before, strict=True)]
                self._before = sums
                samples = new[SAMPLES] if is_counted else math.nan
                counts = samples, new[TOKENS] - new[PADDING], new[PADDING]
                seconds = (f"{each:.6g}" for each in times)
                rows.append([f"{step:.0f}", *seconds, *map("{:.10g}".format, counts)])
            if rows:
                file = self._folder.path / STEP_TIMES
                heads = [] if file.exists() else [COLUMNS]
                with file.open("a", encoding="utf-8", newline="") as opened:
                    csv.writer(opened, lineterminator="\n").writerows([*heads, *rows])
        except (OSError, RuntimeError) as error:  # a full disk, or a broken device:
            # a training must not fail because of its report
            print(f"trainkit | report: no throughput: {error}", flush=True)
