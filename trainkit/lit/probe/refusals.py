"""Refusals of settings in which `find_micro_batch` can find no size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from trainkit.errors import TrainkitError
from trainkit.lit._compat import starts_processes_for_fit
from trainkit.lit.callback.base import fetches_batches, has_callback

BY_HAND = "Choose it by hand: trainkit plan --target ... --max-micro-batch ..."

_SCHEDULES = ("GradientAccumulationScheduler", "AccumulationSchedule")


def refuse_before_fit(trainer: Any, module: Any) -> None:
    """Refuse what is known before the Trainer has begun.

    Raises:
        TrainkitError: there is no size to find with this module, callback or backend.
    """
    _refuse_split(trainer, module)
    _refuse_module(module)
    _refuse_schedules(trainer)
    strategy = trainer.strategy
    if starts_processes_for_fit(strategy):
        raise TrainkitError(
            f"find_micro_batch: {type(strategy).__name__} trains in processes that end "
            f"with fit, and what they find is lost with them. Use strategy='ddp'."
        )
    _refuse_communicating(trainer, module)


def refuse_in_fit(trainer: Any, module: Any) -> None:
    """Refuse what is known once the module is set up.

    Raises:
        TrainkitError: there is no size to find with its layers or this backend.
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
            f"one tensor, and received the terms {sorted(map(str, loss))}. Several "
            f"terms need split windows, whose size MicroBatching('auto') finds."
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
    if fetches_batches(module):
        raise TrainkitError(
            f"find_micro_batch: {name}.training_step(dataloader_iter) fetches its "
            f"batches itself. Take (batch, batch_idx). {BY_HAND}"
        )


def _refuse_schedules(trainer: Any) -> None:
    for callback in trainer.callbacks:
        if has_callback([callback], *_SCHEDULES):
            raise TrainkitError(
                f"find_micro_batch: {type(callback).__name__} changes "
                f"accumulate_grad_batches during training, so there is no single "
                f"effective batch to keep. Remove it from the callbacks for the "
                f"search. {BY_HAND}"
            )


def _refuse_communicating(trainer: Any, module: Any) -> None:
    """Refuse a backend or a layer that communicates within a pass.

    If a rank ran out of memory there, the others would wait for it for ever.
    """
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
