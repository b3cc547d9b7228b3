"""What a training trains on in a second."""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

from lightning.pytorch import Callback
from torch import Tensor

from trainkit.core.window import PADDING, SAMPLES, TOKENS
from trainkit.lit._compat import replaced
from trainkit.lit.callback.base import windows_of

_FETCH = ".train_dataloader_next"
"""The end of the name under which Lightning profiles the wait for a batch."""


class _Mark(NamedTuple):
    """The end of an optimizer step, in sums since training began."""

    step: int
    seconds: float
    waited: float
    totals: Tensor | None
    """What the windows add up to, on the device; None if nobody counts."""
    counts_samples: bool


class Throughput(Callback):
    """Measures what a process trains on in a second, for `summary.json`.

    It measures from the end of the first optimizer step to the end of the last one, by
    the first rank's clock, without validations, checkpoints and what Lightning does
    beside them.

    Samples and tokens are those of the windows, of all ranks; with several optimizers,
    of the first one's. They are added up on the device anyway, and are read once, after
    training: that wait belongs to the last step. `WindowMonitor` counts tokens; without
    it there are none.
    """

    def __init__(self) -> None:
        self._listening = ExitStack()
        self._step = -1
        self._first: _Mark | None = None
        self._last: _Mark | None = None
        self._batch_end = self._fetch_start = self._aside = self._waited = 0.0
        self._is_aside = False

    def __getstate__(self) -> dict[str, Any]:
        return vars(type(self)())  # a copy begins anew

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
        now = perf_counter()
        self._batch_end, self._is_aside = now, False
        if trainer.global_step == self._step or trainer.fast_dev_run:
            return
        self._step = trainer.global_step
        windows = windows_of(trainer)
        account = None if windows is None else windows.ledger.of()
        counted = (None, False)
        if account is not None:
            counted = (account.sums, account.counts_samples)
        times = (self._step, now - self._aside, self._waited)
        self._last = _Mark(*times, *counted)
        self._first = self._first or self._last

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._is_aside = True

    def on_save_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        self._is_aside = True

    def on_exception(self, trainer: Any, pl_module: Any, exception: Any) -> None:
        self._listening.close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._listening.close()

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

    def facts(self) -> dict[str, Any] | None:
        """The measured rates, None where one is not known; waits for the device.

        Returns:
            None before the second step.
        """
        first, last = self._first, self._last
        if first is None or last is None or last.seconds <= first.seconds:
            return None
        samples = tokens = padding = math.nan
        since = perf_counter()
        if first.totals is not None and last.totals is not None:
            new = (last.totals - first.totals.to(last.totals)).tolist()
            samples = new[SAMPLES] if last.counts_samples else math.nan
            tokens, padding = new[TOKENS], new[PADDING]
        seconds = last.seconds - first.seconds + perf_counter() - since
        steps = last.step - first.step
        return {
            "steps": steps,
            "seconds": seconds,
            "steps_per_second": steps / seconds,
            "samples_per_second": _share(samples, seconds),
            "tokens_per_second": _share(tokens - padding, seconds),
            "padding": padding / tokens if tokens > 0 else None,
            "waiting": (last.waited - first.waited) / seconds,
        }


def _share(part: float, seconds: float) -> float | None:
    return part / seconds if part > 0 else None
