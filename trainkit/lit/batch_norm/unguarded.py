"""What is said of BatchNorm without a guard, at the first batch."""

from __future__ import annotations

from typing import Any

from trainkit.core.batch_norm.layers import listed, normalising_by_batch
from trainkit.lit.batch_size.effective import may_be_several
from trainkit.lit.callback.base import WindowOwner, has_callback
from trainkit.lit.callback.table import say


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
    if trainer.is_global_zero:
        say(trainer, ("BatchNorm", text))
