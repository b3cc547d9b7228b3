"""Warnings about BatchNorm in small micro-batches, with the remedies by name."""

from __future__ import annotations

import warnings
from typing import Any, Literal

from trainkit.core.batch_norm.layers import (
    BatchNorm,
    listed,
    normalising_by_batch,
    num_sharing_ranks,
)
from trainkit.core.plan.options import brief
from trainkit.core.strategies import num_samples
from trainkit.errors import TrainkitError
from trainkit.lit.batch_norm.policies import Policy
from trainkit.lit.batch_size import (
    find_effective_batch,
    longest_window,
    may_be_several,
)
from trainkit.lit.callback.base import WindowOwner, has_callback
from trainkit.lit.callback.table import say

REMEDIES = (
    "For the running statistics: BatchNormGuard('momentum') makes them forget as "
    "slowly as the big batch's, 'recalibrate' computes them from the data before they "
    "are used. For the noise: 'group_norm' replaces the layers, and "
    "Trainer(sync_batchnorm=True) computes statistics over all ranks. For both: "
    "'exact' normalises by the whole window, which must be one loader batch that "
    "MicroBatching cuts; 'freeze' keeps the statistics of a pretrained model. "
    "'ignore' gives no warning."
)


class Announce(Policy):
    """Warns, or refuses, if statistics come from few samples of a large window.

    What the loader says is judged before the first step, and the first batch after it:
    the loader may say nothing, and a module the size of its windows later.
    """

    def __init__(
        self, how: Literal["warn", "error"] = "warn", *, min_samples: int
    ) -> None:
        self._how = how
        self._min_samples = min_samples
        self._outcome = ""
        self._is_over = False  # the first batch

    def start(self, trainer: Any, module: Any, layers: dict[str, BatchNorm]) -> None:
        self._outcome = ""
        batch = find_effective_batch(trainer, unit="samples")
        self._is_over = False
        if batch is not None and batch.is_exact:
            self._judge(trainer, layers, batch.micro_batch, batch.accumulate)

    def end_batch(
        self, trainer: Any, layers: dict[str, BatchNorm], batch: Any, num_parts: int
    ) -> None:
        if not self._is_over:
            self._is_over = True
            number = longest_window(trainer) * num_parts
            self._judge(trainer, layers, float(num_samples(batch)) / num_parts, number)

    def _judge(
        self,
        trainer: Any,
        layers: dict[str, BatchNorm],
        samples: float,
        num_micro_batches: int,
    ) -> None:
        """Warn or refuse, once, if micro-batches are too small for the layers.

        Args:
            trainer: in `fit`.
            layers: the layers that train.
            samples: the samples of a micro-batch, on one rank.
            num_micro_batches: the micro-batches of a window, on one rank.
        """
        if self._outcome or num_micro_batches <= 1:
            return
        seen = {n: samples * num_sharing_ranks(x) for n, x in layers.items()}
        few = {name: n for name, n in seen.items() if n < self._min_samples}
        if not few:
            return
        each = ", ".join(brief(n) for n in sorted(set(few.values())))
        outcome = {"warn": "warned", "error": "refused"}[self._how]
        self._outcome = f"on {each} samples ({outcome})"
        text = (
            f"BatchNorm: {listed(list(few))} normalise{'s' * (len(few) == 1)} by the "
            f"statistics of {each} samples, those of one micro-batch, and a window has "
            f"{brief(num_micro_batches)} micro-batches (min_samples="
            f"{self._min_samples}). So few samples make the statistics noisy, which "
            f"accumulation cannot mend, and running statistics move "
            f"{brief(num_micro_batches)} times a step. {REMEDIES}"
        )
        if self._how == "error":
            raise TrainkitError(text)
        if trainer.is_global_zero:
            warnings.warn(text, stacklevel=2)

    def summary(self, num_layers: int) -> str:
        return self._outcome


def say_unguarded(trainer: Any, pl_module: Any, windows: WindowOwner) -> None:
    """Name layers that normalise by micro-batches, where no `BatchNormGuard` is.

    By the first batch, the module's own hooks have decided which layers train. Nothing
    is said if each window is one micro-batch.
    """
    names = normalising_by_batch(pl_module)
    is_guarded = has_callback(trainer.callbacks, "BatchNormGuard")
    if not names or is_guarded or not may_be_several(trainer, pl_module, windows):
        return
    text = (
        f"{len(names)} layer{'s' * (len(names) != 1)} in training mode "
        f"({listed(names, at_most=2)}) normalise{'s' * (len(names) == 1)} by the "
        f"statistics of each micro-batch, so the step is not the big batch's; "
        f"BatchNormGuard has remedies"
    )
    say(trainer, ("BatchNorm", text))
