"""The refusal of a training in which `find_micro_batch` can find no size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from trainkit.errors import TrainkitError
from trainkit.lit._compat import starts_processes_for_fit
from trainkit.lit.callback.base import fetches_batches, has_callback

BY_HAND = "Choose it by hand: trainkit plan --target ... --max-micro-batch ..."

_SCHEDULES = ("GradientAccumulationScheduler", "AccumulationSchedule")


def refuse(trainer: Any, module: Any) -> None:
    """Refuse what cuts batches or communicates by itself.

    Raises:
        TrainkitError: there is no size to find with this module, callback or backend.
    """
    for why in _why_not(trainer, module):
        raise TrainkitError(f"find_micro_batch: {why}. {BY_HAND}")


def _why_not(trainer: Any, module: Any) -> Iterator[str]:
    name, strategy = type(module).__name__, trainer.strategy
    for owner in (module, *trainer.callbacks):
        if getattr(owner, "micro_batching", None) is not None:
            yield (
                f"{type(owner).__name__}.micro_batching cuts loader batches by itself, "
                f"and MicroBatching('auto') finds the size of the cut"
            )
        if has_callback([owner], *_SCHEDULES):
            yield (
                f"{type(owner).__name__} changes accumulate_grad_batches during "
                f"training, so there is no single effective batch to keep"
            )
    if not module.automatic_optimization:
        yield f"{name} optimizes manually, and decides itself how long its windows are"
    if fetches_batches(module):
        yield f"{name}.training_step(dataloader_iter) fetches its batches itself"
    for path, parameter in module.named_parameters():
        if trainer.training and is_lazy(parameter):
            yield f"{path} gets its shape in the first forward pass, which stays"
    if starts_processes_for_fit(strategy):
        yield (
            f"{type(strategy).__name__} trains in processes that end with fit, and "
            f"what they find is lost with them; strategy='ddp' keeps it"
        )
    for each in _communicating(strategy, module) if trainer.world_size > 1 else ():
        yield (
            f"on {trainer.world_size} ranks {each} communicates within a pass, and a "
            f"rank that runs out of memory there leaves the others waiting"
        )


def _communicating(strategy: Any, module: Any) -> Iterator[str]:
    if "DDPStrategy" not in {cls.__name__ for cls in type(strategy).__mro__}:
        yield type(strategy).__name__
    if any(isinstance(each, nn.SyncBatchNorm) for each in module.modules()):
        yield "SyncBatchNorm"
    if getattr(strategy.model, "static_graph", False):
        yield "DDP with static_graph=True"
