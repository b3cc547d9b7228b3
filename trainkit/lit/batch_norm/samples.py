"""Micro-batches of the training data, read without the loader that trains."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from trainkit.errors import TrainkitError
from trainkit.lit._compat import (
    before_batch_transfer,
    combined_loader,
    forget_iterator,
)


def on_device(trainer: Any, module: Any, batch: Any) -> Any:
    """A batch as `training_step` gets it."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = before_batch_transfer(module, batch)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def refuse_unreadable(trainer: Any) -> None:
    """Refuse loaders that can be read only once."""
    for loader in combined_loader(trainer).flattened:
        _fresh(loader)


def from_beginning(trainer: Any) -> Iterator[Any]:
    """The batches of all loaders from the beginning, combined as in training."""
    combined = copy.copy(combined_loader(trainer))
    combined.flattened = [_fresh(loader) for loader in combined.flattened]
    return (batch for batch, _, _ in combined)


def _fresh(loader: Any) -> Any:
    """A copy of a loader that can be iterated without effect on the original."""
    try:
        again = copy.copy(loader)
    except TypeError as error:
        raise TrainkitError(
            f"BatchNormGuard('recalibrate'): the training data are a "
            f"{type(loader).__name__}, which can be read only once, so training would "
            f"miss what is read here. Give a loader that can be iterated again."
        ) from error
    if not isinstance(loader, DataLoader):
        return again
    forget_iterator(again)
    keep = [loader.collate_fn, loader.worker_init_fn, loader.multiprocessing_context]
    memo = {id(each): each for each in keep}
    data = loader.dataset
    # A stream may keep its position in an attribute.
    memo[id(data)] = copy.copy(data) if isinstance(data, IterableDataset) else data
    # A sampler may hold the rows without the data set that wraps them.
    counted = getattr(loader.sampler, "dataset", None)
    memo.setdefault(id(counted), counted)
    try:
        # A sampler may draw from its own generator, so it gets a copy.
        return copy.deepcopy(again, memo)
    except (TypeError, RuntimeError):
        return again
