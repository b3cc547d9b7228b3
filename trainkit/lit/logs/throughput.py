"""How fast a training was, and how long it waited for its data."""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import Any

from lightning.pytorch import Callback
from torch import Tensor

from trainkit.core.ledger import Account
from trainkit.core.window import PADDING, SAMPLES, TOKENS
from trainkit.lit._compat import replaced
from trainkit.lit.callback.base import find_callback, windows_of

_FETCH = ".train_dataloader_next"
"""The end of the name under which Lightning profiles the wait for a batch."""


class Throughput(Callback):
    """Measures samples and tokens per second, from the first optimizer step on.

    The first step is left out, since much is prepared in it. So are validations,
    checkpoints and what Lightning does beside them between two batches. Samples and
    tokens are those of the windows, of all ranks, which are added up on the device
    anyway: nothing is exchanged here, and nothing waits for the device before the end.

    Tokens are counted by `WindowMonitor`, without those that only pad. The time is that
    of the first rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self._listening = ExitStack()
        self._forget()

    def _forget(self) -> None:
        self._first_step = 0
        self._began: float | None = None
        self._ended: float | None = None
        self._counted: Tensor | None = None
        self._account: Account | None = None
        self._batch_end = self._fetch_start = 0.0
        self._aside = self._waited = 0.0
        self._is_aside = self._has_fetched = False
        self._num_steps = 0

    def __getstate__(self) -> dict[str, Any]:
        return vars(type(self)())  # a copy begins anew

    # ---- hooks -----------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._forget()
        self._first_step = trainer.global_step
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
        self._batch_end, self._is_aside = perf_counter(), False
        if trainer.global_step == self._first_step:
            return
        windows = windows_of(trainer)
        self._account = None if windows is None else windows.ledger.of()
        if self._began is None:
            self._began = self._batch_end
            self._first_step = trainer.global_step
            if self._account is not None:
                self._counted = self._account.sums
        self._num_steps = trainer.global_step - self._first_step

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._is_aside = True

    def on_save_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        self._is_aside = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._account is not None:
            self._account.sums.tolist()  # waits for the last step
        self._end()

    def on_exception(
        self, trainer: Any, pl_module: Any, exception: BaseException
    ) -> None:
        self._end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._end()

    # ---- time ------------------------------------------------------------------------

    def _on_start(self, profile: Any, action: str) -> None:
        if action.endswith(_FETCH):
            self._fetch_start = perf_counter()
            self._has_fetched = True
            self._leave_out(self._fetch_start)
        profile(action)

    def _on_stop(self, profile: Any, action: str) -> None:
        profile(action)
        if action.endswith(_FETCH) and self._began is not None:
            self._waited += perf_counter() - self._fetch_start

    def _leave_out(self, until: float) -> None:
        """Leave out the time since the last batch, if there was a validation, say."""
        if self._is_aside and self._began is not None:
            self._aside += until - self._batch_end
        self._is_aside = False

    def _end(self) -> None:
        self._listening.close()
        if self._ended is None:
            self._ended = perf_counter()
            self._leave_out(self._ended)

    # ---- the numbers -----------------------------------------------------------------

    def facts(self) -> dict[str, float | None] | None:
        """The numbers, None where one is not known; waits for the device.

        None if there were no two optimizer steps.
        """
        if self._began is None or self._ended is None or not self._num_steps:
            return None
        seconds = self._ended - self._began - self._aside
        samples, tokens, padding = self._counts()
        return {
            "steps": self._num_steps,
            "seconds": seconds,
            "steps_per_second": self._num_steps / seconds,
            "samples_per_second": _known(samples / seconds),
            "tokens_per_second": _known((tokens - padding) / seconds),
            "padding": _known(padding / tokens),
            "waiting": self._waited / seconds if self._has_fetched else None,
        }

    def _counts(self) -> tuple[float, float, float]:
        """Samples, tokens and those that pad, since the first step; NaN if unknown."""
        if self._account is None or self._counted is None:
            return math.nan, math.nan, math.nan
        sums = self._account.sums
        new = (sums - self._counted.to(sums)).tolist()
        samples = new[SAMPLES] if self._account.counts_samples else math.nan
        return samples or math.nan, new[TOKENS] or math.nan, new[PADDING]


def throughput_of(trainer: Any) -> dict[str, float | None] | None:
    """The numbers of the Trainer's `Throughput`, if it has one and they are known."""
    found = find_callback(trainer, Throughput)
    return None if found is None else found.facts()


def _known(number: float) -> float | None:
    return number if math.isfinite(number) else None
