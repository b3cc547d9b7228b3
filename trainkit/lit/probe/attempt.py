"""The order in which sizes are tried, and an attempt with one, on all ranks at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainkit.core.nested import describe
from trainkit.core.out_of_memory import is_out_of_memory, release
from trainkit.core.plan.effective_batch import BatchPlan
from trainkit.errors import TrainkitError
from trainkit.lit._compat import scaler_of, step_arguments
from trainkit.lit.aside import Kept, muted
from trainkit.lit.batch_norm.recalibrate import on_device
from trainkit.lit.probe.rows import Rows
from trainkit.lit.probe.setting import BY_HAND


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The result of one size of a micro-batch.

    Attributes:
        size: rows of one rank's micro-batch.
        fits: whether it fits, with the margin, on every rank.
        peak_bytes: the most memory that a rank's device had allocated, if known.
    """

    size: int
    fits: bool
    peak_bytes: int | None = None

    def __str__(self) -> str:
        """
        >>> str(Trial(size=8, fits=True, peak_bytes=2**30))
        'fits, 1.0 GiB at most'
        """
        if not self.fits:
            return "does not fit"
        if self.peak_bytes is None:
            return "fits"
        return f"fits, {self.peak_bytes / 2**30:,.1f} GiB at most"


class DoesNotFit(Exception):
    """Raised if not even the smallest size fits."""


def sizes_for(*, target: int, world_size: int, largest: int) -> list[int]:
    """All micro-batches that a `BatchPlan` for this target could have, smallest first.

    >>> sizes_for(target=96, world_size=4, largest=12)
    [1, 2, 3, 4, 6, 8, 12]
    """
    sizes: list[int] = []
    while largest > 0:
        plan = BatchPlan.make(
            target=target, world_size=world_size, max_micro_batch=largest
        )
        sizes.insert(0, plan.micro_batch)
        largest = plan.micro_batch - 1  # the plan of all sizes between them, too
    return sizes


def search(
    sizes: Sequence[int], start: int, attempt: Callable[[int], Trial]
) -> list[Trial]:
    """Try sizes until the largest that fits is known.

    The search begins near `start` and halves the size until one fits. Then it doubles
    the size, and bisects between a size that fits and one that does not.

    Args:
        sizes: the sizes that may be chosen, smallest first.
        start: the search begins with the largest size that is not above this.
        attempt: tries one size.

    Returns:
        The sizes that were tried, smallest first.

    Raises:
        DoesNotFit: the smallest size does not fit.
    """
    low, high = _at_most(sizes, start), len(sizes)
    known = [attempt(sizes[low])]
    while not known[-1].fits:
        if low == 0:
            raise DoesNotFit
        high, low = low, _at_most(sizes, sizes[low] // 2)
        known.append(attempt(sizes[low]))
    while low + 1 < high:
        twice = max(_at_most(sizes, 2 * sizes[low]), low + 1)
        middle = (low + high) // 2 if high < len(sizes) else twice
        known.append(attempt(sizes[middle]))
        if known[-1].fits:
            low = middle
        else:
            high = middle
    return sorted(known, key=lambda trial: trial.size)


def _at_most(sizes: Sequence[int], size: int) -> int:
    """The index of the largest size that is not above another."""
    return max((i for i, each in enumerate(sizes) if each <= size), default=0)


FITS, OUT_OF_MEMORY, FAILED = range(3)
"""The outcomes of an attempt; the worst one of all ranks counts."""


@dataclass
class Attempts:
    """Tries sizes in a Trainer that is about to run its first batch.

    The longest rows, and some more of them (the margin), must fit twice: before the
    first optimizer step, and after it, beside the optimizer's state and gradients, as
    inside a window. One rank alone may fail, so ranks communicate only after each half,
    to agree on the outcome.

    Args:
        trainer: in `fit`, on every rank.
        rows: the rows of this rank's loader.
        margin: how many more rows must fit, as a share of the size.
    """

    trainer: Any
    rows: Rows
    margin: float

    def __post_init__(self) -> None:
        self._module = self.trainer.lightning_module
        self._snapshot = Kept(self._module, steps=True)
        self._last_batch: str = "none was made"
        self._failure: BaseException | None = None

    def try_size(self, size: int) -> Trial:
        """Find out whether a size fits on every rank."""
        device = self.trainer.strategy.root_device
        is_gpu, peak = device.type == "cuda", None
        if is_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        with self._snapshot, muted(self._module):
            fits = self._on_every_rank(self._pass, size)
            fits = fits and self._on_every_rank(self._step_and_pass, size)
            if fits and is_gpu:
                peak = self._most(torch.cuda.max_memory_allocated(device))
        return Trial(size=size, fits=fits, peak_bytes=peak)

    def does_not_fit(self) -> TrainkitError:
        """The error for a single row that did not fit."""
        said = "" if self._failure is None else f" {self._failure}"
        return TrainkitError(
            f"find_micro_batch: a micro-batch of one row does not fit: "
            f"{self._last_batch}. Shorten or crop the longest rows, checkpoint "
            f"activations, lower the precision, or take a smaller model.{said}"
        )

    # ---- the two halves of an attempt ------------------------------------------------

    def _pass(self, size: int) -> None:
        extra = math.ceil(size * self.margin) if size > 1 else 0
        self._forward_backward(self.rows.longest(size + extra))

    def _step_and_pass(self, size: int) -> None:
        if scaler_of(self.trainer) is not None:
            # It would skip a step with infinite gradients, and so make no state.
            self._module.zero_grad(set_to_none=False)
        for optimizer in self.trainer.optimizers:
            self.trainer.strategy.optimizer_step(optimizer, lambda: torch.zeros(()))
        self._pass(size)

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

    # ---- agreement -------------------------------------------------------------------

    def _on_every_rank(self, half: Callable[[int], None], size: int) -> bool:
        """Whether a half fits on all ranks."""
        outcome, failure = FITS, None
        try:
            half(size)
        except Exception as error:
            if not is_out_of_memory(error):
                self._most(FAILED)  # the others wait for it
                raise
            outcome, failure = OUT_OF_MEMORY, error
        if failure is not None:
            self._failure = failure
            self._module.zero_grad(set_to_none=True)
            release(failure)
        worst = self._most(outcome)
        if worst == FAILED:
            raise TrainkitError(
                "find_micro_batch: another rank failed, and not because its memory "
                "was full. Look at the error that it printed."
            )
        return worst == FITS

    def _most(self, number: int) -> int:
        """The highest of a number over all ranks."""
        strategy = self.trainer.strategy
        given = torch.tensor(number, device=strategy.root_device)
        return int(strategy.reduce(given, reduce_op="max"))
