"""BatchNorm that nobody guards: the table before training names it."""

from __future__ import annotations

from typing import Any

from trainkit.core.batch_norm.layers import listed, normalising_by_batch
from trainkit.lit.base import WindowOwner, has_callback
from trainkit.lit.effective import longest_window
from trainkit.lit.plan import Row


def unguarded(trainer: Any, pl_module: Any, windows: WindowOwner) -> list[Row]:
    """What is said of BatchNorm where there is no `BatchNormGuard`; nothing where each
    window is one micro-batch.

    Args:
        trainer: about to train.
        pl_module: what trains.
        windows: the callback that divides them.
    """
    names = normalising_by_batch(pl_module)
    is_guarded = has_callback(trainer.callbacks, "BatchNormGuard")
    if not names or is_guarded or not _may_be_several(trainer, pl_module, windows):
        return []
    text = (
        f"{len(names)} layer{'s' * (len(names) != 1)} in training mode "
        f"({listed(names, at_most=2)}) normalise{'s' * (len(names) == 1)} by the "
        f"statistics of each micro-batch, so the step is not the big batch's; "
        f"BatchNormGuard has remedies"
    )
    return [("BatchNorm", text)]


def _may_be_several(trainer: Any, pl_module: Any, windows: WindowOwner) -> bool:
    """Whether a window may have more than one micro-batch."""
    if windows.is_split or not pl_module.automatic_optimization:
        return True
    sizes = [longest_window(trainer)]
    for callback in trainer.callbacks:
        if has_callback([callback], "AccumulationSchedule"):
            sizes += callback.stages.sizes
        elif has_callback([callback], "GradientAccumulationScheduler"):
            sizes += callback.scheduling.values()
    return min(max(sizes), trainer.num_training_batches) > 1
