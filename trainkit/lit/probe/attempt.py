"""Attempts to train with a micro-batch of one size, on all ranks at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainkit.core.nested import describe
from trainkit.core.out_of_memory import is_out_of_memory, release
from trainkit.errors import TrainkitError
from trainkit.lit._compat import scaler_of, step_arguments
from trainkit.lit.aside import Kept, muted
from trainkit.lit.batch_norm.recalibrate import on_device
from trainkit.lit.probe.rows import Rows
from trainkit.lit.probe.search import Trial
from trainkit.lit.probe.setting import BY_HAND

FITS, OUT_OF_MEMORY, FAILED = range(3)
"""The outcomes of an attempt; the worst one of all ranks counts."""

ROUNDS = 3
"""How often each batch is timed. The fastest time counts, as in `timeit`: other work on
the machine can only add to a time."""


@dataclass
class Attempts:
    """Tries sizes in a Trainer that is about to run its first batch.

    The longest rows, and some more of them (the margin), must fit twice: before the
    first optimizer step, and after it, beside the optimizer's state and gradients, as
    inside a window. Then batches in the loader's order are timed. One rank alone may
    fail, so ranks communicate only after each half, to agree on the outcome.

    Args:
        trainer: in `fit`, on every rank.
        rows: the rows of this rank's loader.
        num_batches: how many batches are timed.
        margin: how many more rows must fit, as a share of the size.
        clock: the time in seconds.
    """

    trainer: Any
    rows: Rows
    num_batches: int
    margin: float
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self._module = self.trainer.lightning_module
        self._snapshot = Kept(self._module, steps=True)
        self._last_batch: str = "none was made"
        self._failure: BaseException | None = None

    def try_size(self, size: int) -> Trial:
        """Find out whether a size fits on every rank, and how fast it is."""
        device = self.trainer.strategy.root_device
        is_gpu, peak = device.type == "cuda", None
        if is_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        with self._snapshot, muted(self._module):
            seconds = self._on_every_rank(self._prove, size)
            if seconds is not None:
                seconds = self._on_every_rank(self._measure, size)
            if seconds is None:
                return Trial(size=size, fits=False)
            if is_gpu:
                (peak,) = self._most(torch.cuda.max_memory_allocated(device))
        return Trial(
            size=size,
            fits=True,
            samples_per_second=size * self.num_batches / max(seconds, 1e-9),
            peak_bytes=None if peak is None else int(peak),
        )

    def does_not_fit(self) -> TrainkitError:
        """The error for a single row that did not fit."""
        said = "" if self._failure is None else f" {self._failure}"
        return TrainkitError(
            f"find_micro_batch: a micro-batch of one row does not fit: "
            f"{self._last_batch}. Shorten or crop the longest rows, checkpoint "
            f"activations, lower the precision, or take a smaller model.{said}"
        )

    # ---- the two halves of an attempt ------------------------------------------------

    def _prove(self, size: int) -> float:
        extra = math.ceil(size * self.margin) if size > 1 else 0
        self._forward_backward(self.rows.longest(size + extra))
        return 0.0

    def _measure(self, size: int) -> float:
        if scaler_of(self.trainer) is not None:
            # It would skip a step with infinite gradients, and so make no state.
            self._module.zero_grad(set_to_none=False)
        for optimizer in self.trainer.optimizers:
            self.trainer.strategy.optimizer_step(optimizer, lambda: torch.zeros(()))
        self._prove(size)
        batches = [self.rows.in_order(size, i) for i in range(self.num_batches)]
        return sum(min(self._seconds_for(b) for _ in range(ROUNDS)) for b in batches)

    def _seconds_for(self, batch: Any) -> float:
        started = self._now()
        self._forward_backward(batch)
        return self._now() - started

    # ---- the work of the training loop -----------------------------------------------

    def _forward_backward(self, batch: Any) -> None:
        strategy = self.trainer.strategy
        self._last_batch = describe(batch)
        batch = on_device(self.trainer, self._module, batch)
        without_sync = getattr(strategy, "block_backward_sync", nullcontext)
        with without_sync():
            output = strategy.training_step(*step_arguments(self._module, batch, 0))
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if isinstance(loss, Mapping):
                raise TrainkitError(
                    f"find_micro_batch: training_step returned the terms "
                    f"{sorted(map(str, loss))}, which need split windows; "
                    f"MicroBatching('auto') finds their size. {BY_HAND}"
                )
            if isinstance(loss, Tensor):
                optimizers = self.trainer.optimizers
                strategy.backward(loss, optimizers[0] if optimizers else None)

    def _now(self) -> float:
        device = self.trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return self.clock()

    # ---- agreement -------------------------------------------------------------------

    def _on_every_rank(self, half: Callable[[int], float], size: int) -> float | None:
        """The seconds of the slowest rank for a half; None if one has no room."""
        outcome, seconds, failure = FITS, 0.0, None
        try:
            seconds = half(size)
        except Exception as error:
            if not is_out_of_memory(error):
                self._most(FAILED, seconds)  # the others wait for it
                raise
            outcome, failure = OUT_OF_MEMORY, error
        if failure is not None:
            self._failure = failure
            self._module.zero_grad(set_to_none=True)
            release(failure)
        worst, seconds = self._most(outcome, seconds)
        if worst == FAILED:
            raise TrainkitError(
                "find_micro_batch: another rank failed, and not because its memory "
                "was full. Look at the error that it printed."
            )
        return seconds if worst == FITS else None

    def _most(self, *numbers: float) -> list[float]:
        """The highest of each number over all ranks."""
        strategy = self.trainer.strategy
        row = torch.tensor(numbers, device=strategy.root_device)
        return strategy.reduce(row, reduce_op="max").tolist()
