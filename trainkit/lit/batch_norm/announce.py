"""Warnings about BatchNorm in small micro-batches, with the remedies by name."""

from __future__ import annotations

import warnings
from typing import Any, Literal

from trainkit.core.batch_norm.layers import (
    listed,
    normalising_by_batch,
    num_sharing_ranks,
)
from trainkit.core.plan.options import brief
from trainkit.errors import TrainkitError
from trainkit.lit.batch_norm.policies import Policy, Window
from trainkit.lit.batch_size import may_be_several
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

    Micro-batches are those of the first batch, before its step. Each window is looked
    at: a module may say their size later.
    """

    def __init__(
        self, how: Literal["warn", "error"] = "warn", *, min_samples: int
    ) -> None:
        self._how = how
        self._min_samples = min_samples
        self._outcome = ""

    def begin(self, trainer: Any, module: Any) -> None:
        self._outcome = ""

    def open_window(self, window: Window) -> None:
        number = window.num_micro_batches
        if self._outcome or number <= 1:
            return
        pairs = window.layers.items()
        seen = {name: window.samples * num_sharing_ranks(x) for name, x in pairs}
        few = {name: n for name, n in seen.items() if n < self._min_samples}
        if not few:
            return
        each = ", ".join(brief(n) for n in sorted(set(few.values())))
        outcome = {"warn": "warned", "error": "refused"}[self._how]
        self._outcome = f"on {each} samples ({outcome})"
        text = (
            f"BatchNorm: {listed(list(few))} normalise{'s' * (len(few) == 1)} by the "
            f"statistics of {each} samples, those of one micro-batch, and a window has "
            f"{brief(number)} micro-batches (min_samples="
            f"{self._min_samples}). So few samples make the statistics noisy, which "
            f"accumulation cannot mend, and running statistics move "
            f"{brief(number)} times a step. {REMEDIES}"
        )
        if self._how == "error":
            raise TrainkitError(text)
        if window.trainer.is_global_zero:
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
