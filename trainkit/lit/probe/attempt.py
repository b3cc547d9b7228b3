"""The order in which sizes are tried, and an attempt with one, on all ranks at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from trainkit.core.nested import describe
from trainkit.core.out_of_memory import is_out_of_memory, release
from trainkit.core.plan.effective_batch import BatchPlan
from trainkit.data.rows import Rows
from trainkit.errors import TrainkitError
from trainkit.lit._compat import leaves_fit, step_arguments
from trainkit.lit.aside import Kept, muted
from trainkit.lit.batch_norm.recalibrate import on_device
from trainkit.lit.batch_size import num_replicas
from trainkit.lit.probe.setting import BY_HAND, Setting, refuse


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
        The sizes that were tried, smallest first; that alone if none fits.
    """
    low, high = _at_most(sizes, start), len(sizes)
    known = [attempt(sizes[low])]
    while low and not known[-1].fits:
        high, low = low, _at_most(sizes, sizes[low] // 2)
        known.append(attempt(sizes[low]))
    while low + 1 < high and any(trial.fits for trial in known):
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


@dataclass(eq=False)
class Finder(Callback):
    """Tries sizes before the first batch of a Trainer aside, whose `fit` it ends.

    The longest rows, and some more of them (the margin), must fit twice: before an
    optimizer step, and after it, beside the optimizer's state and gradients, as inside
    a window. One rank alone may fail, so ranks communicate only after each half, to
    agree on the outcome. The step goes by gradients of zero: it only makes the state.

    Attributes:
        setting: where the batch size of the loader is kept.
        target: the samples of one optimizer step, over all ranks.
        start: the size with which the search begins.
        most: the largest size to try, or None.
        margin: how many more rows must fit, as a share of the size.
        trials: the sizes that were tried, smallest first.
        plan: the micro-batch that was chosen, once it is.
    """

    setting: Setting
    target: int
    start: int
    most: int | None
    margin: float
    trials: Sequence[Trial] = ()
    plan: BatchPlan | None = None

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        refuse(trainer, pl_module)
        self.setting.refuse_unread(trainer.train_dataloader)
        self._trainer, self._module = trainer, pl_module
        self._rows = Rows(trainer.train_dataloader)
        # What a size has left in the module takes no room from the next.
        self._kept = Kept(pl_module, tensors=False)
        self._last_batch, self._failure = "none was made", ""
        ranks: Any = {"target": self.target, "world_size": num_replicas(trainer)}
        rows = -self._most(-len(self._rows))
        sizes = sizes_for(**ranks, largest=min(self.most or rows, rows))
        self.trials = search(sizes, self.start, self._try)
        fitting = [trial.size for trial in self.trials if trial.fits]
        if not fitting:
            raise TrainkitError(
                f"find_micro_batch: a micro-batch of one row does not fit: "
                f"{self._last_batch}. Shorten or crop the longest rows, checkpoint "
                f"activations, lower the precision, or take a smaller model."
                f"{self._failure}"
            )
        self.plan = BatchPlan.make(**ranks, max_micro_batch=max(fitting))
        raise leaves_fit(trainer)

    def _try(self, size: int) -> Trial:
        """Find out whether a size fits on every rank."""
        device, peak = self._trainer.strategy.root_device, None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with self._kept, muted(self._module):
            halves = self._pass, self._step_and_pass
            fits = all(self._on_every_rank(half, size) for half in halves)
            if fits and device.type == "cuda":
                peak = self._most(torch.cuda.max_memory_allocated(device))
        self._module.zero_grad(set_to_none=True)
        return Trial(size=size, fits=fits, peak_bytes=peak)

    def _step_and_pass(self, size: int) -> None:
        strategy = self._trainer.strategy
        # A scaler would skip a step with infinite gradients, which makes no state.
        self._module.zero_grad(set_to_none=False)
        for optimizer in self._trainer.optimizers:
            strategy.optimizer_step(optimizer, lambda: torch.zeros(()))
        self._pass(size)

    def _pass(self, size: int) -> None:
        extra = math.ceil(size * self.margin) if size > 1 else 0
        batch = self._rows.longest(size + extra)
        self._last_batch = describe(batch)
        batch = on_device(self._trainer, self._module, batch)
        strategy = self._trainer.strategy
        with getattr(strategy, "block_backward_sync", nullcontext)():
            output = strategy.training_step(*step_arguments(self._module, batch, 0))
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if isinstance(loss, Mapping):
                raise TrainkitError(
                    f"find_micro_batch: training_step returned the terms "
                    f"{sorted(map(str, loss))}, which need split windows; "
                    f"MicroBatching('auto') finds their size. {BY_HAND}"
                )
            if isinstance(loss, Tensor):
                strategy.backward(loss, next(iter(self._trainer.optimizers), None))

    def _on_every_rank(self, half: Callable[[int], None], size: int) -> bool:
        """Whether a half of an attempt fits on all ranks."""
        outcome = FITS
        try:
            half(size)
        except Exception as error:
            if not is_out_of_memory(error):
                self._most(FAILED)  # the others wait for it
                raise
            outcome, self._failure = OUT_OF_MEMORY, f" {error}"
            self._module.zero_grad(set_to_none=True)
            release(error)
        worst = self._most(outcome)
        if worst == FAILED:
            raise TrainkitError(
                "find_micro_batch: another rank failed, and not because its memory "
                "was full. Look at the error that it printed."
            )
        return worst == FITS

    def _most(self, number: int) -> int:
        """The highest of a number over all ranks."""
        strategy = self._trainer.strategy
        given = torch.tensor(number, device=strategy.root_device)
        return int(strategy.reduce(given, reduce_op="max"))
