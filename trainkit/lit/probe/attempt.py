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

FITS, OUT_OF_MEMORY, FAILED = 0.0, 1.0, 2.0
"""The outcomes of an attempt; the worst one of all ranks counts."""

ROUNDS = 3
"""How often each batch is timed. The fastest time counts, as in `timeit`: other work on
the machine can only add to a time."""

MOST_SKIPPED = 30
"""The most steps that a gradient scaler may skip. It halves its scale with each, and
begins at 65,536."""


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
        is_gpu, seconds, peak = device.type == "cuda", 0.0, 0.0
        if is_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        try:
            with muted(self._module):
                for half in (self._prove, self._measure):
                    fits, seconds, peak = self._on_every_rank(half, size)
                    if not fits:
                        return Trial(size=size, fits=False)
        finally:
            self._snapshot.restore()
        return Trial(
            size=size,
            fits=True,
            samples_per_second=size * self.num_batches / max(seconds, 1e-9),
            peak_bytes=int(peak) if is_gpu else None,
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
        self._step()
        for _ in range(0 if scaler_of(self.trainer) is None else MOST_SKIPPED):
            if all(optimizer.state for optimizer in self.trainer.optimizers):
                break  # the scaler has not skipped the step
            self._module.zero_grad()
            self._prove(size)
            self._step()
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

    def _step(self) -> None:
        for optimizer in self.trainer.optimizers:
            self.trainer.strategy.optimizer_step(optimizer, lambda: torch.zeros(()))

    def _now(self) -> float:
        device = self.trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return self.clock()

    # ---- agreement -------------------------------------------------------------------

    def _on_every_rank(
        self, half: Callable[[int], float], size: int
    ) -> tuple[bool, float, float]:
        """Run a half on every rank.

        Returns:
            Whether it fits, the seconds of the slowest rank, and the highest peak.
        """
        error: Exception | None = None
        outcome, seconds, peak = FITS, 0.0, 0.0
        strategy = self.trainer.strategy
        device = strategy.root_device
        try:
            seconds = half(size)
        except Exception as raised:
            error = raised
            outcome = OUT_OF_MEMORY if is_out_of_memory(raised) else FAILED
        if error is not None and outcome == OUT_OF_MEMORY:
            self._module.zero_grad(set_to_none=True)
            self._failure = error
            release(error)
        if device.type == "cuda":
            peak = float(torch.cuda.max_memory_allocated(device))
        row = torch.tensor([outcome, seconds, peak], device=device)
        worst, seconds, peak = strategy.reduce(row, reduce_op="max").tolist()
        if error is not None and outcome == FAILED:
            raise error
        if worst == FAILED:
            raise TrainkitError(
                "find_micro_batch: another rank failed, and not because its memory "
                "was full. Look at the error that it printed."
            )
        return worst == FITS, seconds, peak
