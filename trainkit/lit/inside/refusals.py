"""Refusals of the inner cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from trainkit.errors import TrainkitError
from trainkit.lit.batch_size import may_be_several
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


LOGS = ("log", "log_dict", "log_exact")


def refused_logs(
    pl_module: Any, module: nn.Module, name: str
) -> list[tuple[nn.Module, str, Callable[..., None]]]:
    """What stands for the methods that log while a chunk runs.

    Args:
        pl_module: what trains.
        module: which runs in chunks.
        name: of it.
    """
    return [
        (each, log, _refusal(log, name))
        for each in {pl_module, *module.modules()}
        if hasattr(each, "log") and hasattr(each, "log_dict")
        for log in LOGS
        if hasattr(each, log)
    ]


def _refusal(log: str, name: str) -> Callable[..., None]:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise TrainkitError(
            f"self.{log} within {name}, which runs in chunks of rows, would log each "
            f"chunk's value, twice: return the value, and log it in training_step."
        )

    return refuse
