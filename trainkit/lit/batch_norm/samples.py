"""Micro-batches of the training data, read without the loader that trains."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from trainkit.errors import TrainkitError
from trainkit.lit._compat import (
    before_batch_transfer,
    combined_loader,
    forget_iterator,
)

_WHOLE = (SequentialSampler, RandomSampler, DistributedSampler)
"""Samplers that take each row of a data set once."""


def loader_of_samples(
    trainer: Any, num_batches: int, *, seed: int
) -> Callable[[], Iterable[Any]]:
    """A function that starts an iteration over training data.

    Rows of a data set are drawn in random order, `num_batches` micro-batches for each
    rank at most, and no row twice. A loader that does not simply take each row of a
    data set once is iterated from its beginning.
    """
    loader = trainer.train_dataloader
    if not _takes_whole_dataset(loader):
        return lambda: _from_beginning(trainer)
    # Without a distributed sampler the whole data set belongs to this rank.
    replicas = getattr(loader.sampler, "num_replicas", 1)
    rank = getattr(loader.sampler, "rank", 0)
    num_rows = len(loader.dataset)
    wanted = num_batches * loader.batch_size * replicas
    # Shuffled even if all rows are taken: data may be sorted, and one pass normalises
    # each micro-batch by itself.
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(num_rows, generator=generator)[:wanted].tolist()
    return lambda: DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=rows[rank::replicas],
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )


def on_device(trainer: Any, module: Any, batch: Any) -> Any:
    """A batch as `training_step` gets it."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = before_batch_transfer(module, batch)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def _takes_whole_dataset(loader: Any) -> bool:
    return (
        type(loader) is DataLoader
        and loader.batch_size is not None
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader.sampler) in _WHOLE
    )


def refuse_unreadable(trainer: Any) -> None:
    """Refuse loaders that can be read only once."""
    for loader in combined_loader(trainer).flattened:
        _fresh(loader)


def _from_beginning(trainer: Any) -> Iterator[Any]:
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
