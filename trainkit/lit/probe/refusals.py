"""Refuse by name the settings in which no size can be found."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from trainkit.errors import TrainkitError
from trainkit.lit._compat import starts_processes_for_fit

BY_HAND = "Choose it by hand: trainkit plan --target ... --max-micro-batch ..."

_OWN_SCHEDULES = {"GradientAccumulationScheduler", "AccumulationSchedule"}


def refuse_before_fit(trainer: Any, module: Any) -> None:
    """Refuse what can be known before the Trainer has begun.

    Raises:
        TrainkitError: the module, a callback or the backend leaves no size to find.
    """
    _refuse_split(trainer, module)
    _refuse_module(module)
    _refuse_schedules(trainer)
    strategy = trainer.strategy
    if starts_processes_for_fit(strategy):
        raise TrainkitError(
            f"find_micro_batch: {type(strategy).__name__} trains in processes that end "
            f"with fit, and what they find ends with them. Use strategy='ddp'."
        )
    _refuse_communicating(trainer, module)


def refuse_in_fit(trainer: Any, module: Any) -> None:
    """Refuse what is known once the module is set up.

    Raises:
        TrainkitError: its optimizers or its layers leave no size to find.
    """
    _refuse_communicating(trainer, module)
    lazy = [name for name, p in module.named_parameters() if is_lazy(p)]
    if lazy:
        raise TrainkitError(
            f"find_micro_batch: {lazy[0]} gets its shape in the first forward pass, "
            f"which cannot be undone. Run one batch through the module first."
        )


def refuse_loss(loss: Any) -> None:
    if isinstance(loss, Mapping):
        raise TrainkitError(
            f"training_step: find_micro_batch is for streamed windows, whose loss is "
            f"one tensor, and received the terms {sorted(map(str, loss))}. A window of "
            f"several terms is split: MicroBatching('auto') finds its size."
        )


def _refuse_split(trainer: Any, module: Any) -> None:
    for owner in (module, *trainer.callbacks):
        if getattr(owner, "micro_batching", None) is not None:
            raise TrainkitError(
                f"find_micro_batch: {type(owner).__name__}.micro_batching cuts loader "
                f"batches by itself, so there is no loader batch to find. "
                f"MicroBatching('auto') finds the size of the cut; or leave "
                f"micro_batching out (micro_batching=none in a configuration)."
            )


def _refuse_module(module: Any) -> None:
    name = type(module).__name__
    if not module.automatic_optimization:
        raise TrainkitError(
            f"find_micro_batch: {name} optimizes manually, so accumulate_grad_batches "
            f"does not decide how long its windows are. {BY_HAND}"
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise TrainkitError(
            f"find_micro_batch: {name}.training_step(dataloader_iter) fetches its "
            f"batches itself. Take (batch, batch_idx). {BY_HAND}"
        )


def _refuse_schedules(trainer: Any) -> None:
    for callback in trainer.callbacks:
        names = {cls.__name__ for cls in type(callback).__mro__}
        if names & _OWN_SCHEDULES:
            raise TrainkitError(
                f"find_micro_batch: {type(callback).__name__} changes "
                f"accumulate_grad_batches while training, so there is no one effective "
                f"batch to keep. Remove it from the callbacks meanwhile. {BY_HAND}"
            )


def _refuse_communicating(trainer: Any, module: Any) -> None:
    """A rank that runs out of memory in a pass that communicates leaves the others
    waiting for it, for ever."""
    if trainer.world_size == 1:
        return
    strategy = trainer.strategy
    kinds = {cls.__name__ for cls in type(strategy).__mro__}
    if "DDPStrategy" not in kinds:
        raise TrainkitError(
            f"find_micro_batch: on {trainer.world_size} ranks "
            f"{type(strategy).__name__} may communicate within a pass, and a rank that "
            f"runs out of memory there leaves the others waiting. Use strategy='ddp', "
            f"or one rank. {BY_HAND}"
        )
    if any(isinstance(each, nn.SyncBatchNorm) for each in module.modules()):
        raise TrainkitError(
            f"find_micro_batch: SyncBatchNorm communicates within a pass, and a rank "
            f"that runs out of memory there leaves the others waiting. Find the size "
            f"with Trainer(sync_batchnorm=False). {BY_HAND}"
        )
    if getattr(trainer.strategy.model, "static_graph", False):
        raise TrainkitError(
            "find_micro_batch: DDP with static_graph=True runs no window of several "
            "micro-batches. Use DDPStrategy(static_graph=False)."
        )
