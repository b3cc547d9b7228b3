"""The row on BatchNorm without a guard, in the table before training."""

from __future__ import annotations

from typing import Any

from trainkit.core.batch_norm.layers import listed, normalising_by_batch
from trainkit.lit.batch_size.effective import may_be_several
from trainkit.lit.callback.base import WindowOwner, has_callback
from trainkit.lit.callback.table import Row


def unguarded(trainer: Any, pl_module: Any, windows: WindowOwner) -> list[Row]:
    """The table's row on BatchNorm that has no `BatchNormGuard`.

    There is no row if each window is one micro-batch.
    """
    names = normalising_by_batch(pl_module)
    is_guarded = has_callback(trainer.callbacks, "BatchNormGuard")
    if not names or is_guarded or not may_be_several(trainer, pl_module, windows):
        return []
    text = (
        f"{len(names)} layer{'s' * (len(names) != 1)} in training mode "
        f"({listed(names, at_most=2)}) normalise{'s' * (len(names) == 1)} by the "
        f"statistics of each micro-batch, so the step is not the big batch's; "
        f"BatchNormGuard has remedies"
    )
    return [("BatchNorm", text)]
