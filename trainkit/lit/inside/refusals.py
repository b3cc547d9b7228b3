"""Refusals of the inner cut."""

from __future__ import annotations

from typing import Any

from trainkit.errors import TrainkitError
from trainkit.lit.batch_size.effective import may_be_several
from trainkit.lit.callback.base import WindowOwner


def refuse_several_unweighed(
    trainer: Any, pl_module: Any, windows: WindowOwner
) -> None:
    """Refuse windows of several loader batches of which nobody says what they weigh."""
    if pl_module.automatic_optimization and may_be_several(trainer, pl_module, windows):
        raise TrainkitError(
            f"accumulation: MicroBatching(inside=...) needs no strategy where one "
            f"loader batch is a step, and here a step has several "
            f"(accumulate_grad_batches={trainer.accumulate_grad_batches}). Give the "
            f"loader larger batches, which run in chunks of rows, and leave "
            f"accumulate_grad_batches at 1; or say what a loader batch weighs, such as "
            f"PerSample(), if the loss is a mean over that."
        )
