"""Micro-batches of the training data, beside the loader that trains."""

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

WHOLE = (SequentialSampler, RandomSampler, DistributedSampler)
"""Samplers that take each row of a data set once."""


def loader_of_samples(
    trainer: Any, num_batches: int, *, seed: int
) -> Callable[[], Iterable[Any]]:
    """What starts an iteration over at most so many micro-batches for each rank.

    Rows of a data set are dealt out among the ranks, none twice, as a distributed
    sampler that fills up would, in an order drawn at random. Other loaders are iterated
    anew.
    """
    loader = trainer.train_dataloader
    if not _takes_whole_dataset(loader):
        return lambda: _anew(trainer)
    # Without a distributed sampler the data set is this rank's own.
    replicas = getattr(loader.sampler, "num_replicas", 1)
    rank = getattr(loader.sampler, "rank", 0)
    num_rows = len(loader.dataset)
    wanted = num_batches * loader.batch_size * replicas
    # At random also where all are taken: one pass normalises each micro-batch by
    # itself, and data may come sorted.
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
        and type(loader.sampler) in WHOLE
    )


def refuse_unreadable(trainer: Any) -> None:
    """Loaders that training alone can read."""
    for loader in combined_loader(trainer).flattened:
        _fresh(loader)


def _anew(trainer: Any) -> Iterator[Any]:
    """The loader, or loaders, from the beginning, put together as in training."""
    combined = copy.copy(combined_loader(trainer))
    combined.flattened = [_fresh(loader) for loader in combined.flattened]
    return (batch for batch, _, _ in combined)


def _fresh(loader: Any) -> Any:
    """A copy of the loader, whose iteration does not disturb the one under way."""
    try:
        again = copy.copy(loader)
    except TypeError as error:
        raise TrainkitError(
            f"BatchNormGuard('recalibrate'): the training data are a "
            f"{type(loader).__name__}, which can be read only once, and what is read "
            f"here would be lost to training. Give a loader that starts anew."
        ) from error
    if not isinstance(loader, DataLoader):
        return again
    forget_iterator(again)
    keep = [loader.collate_fn, loader.worker_init_fn, loader.multiprocessing_context]
    memo = {id(each): each for each in keep}
    data = loader.dataset
    # A stream may count by itself where it is.
    memo[id(data)] = copy.copy(data) if isinstance(data, IterableDataset) else data
    # What a sampler counts may be the rows themselves, without what wraps them.
    counted = getattr(loader.sampler, "dataset", None)
    memo.setdefault(id(counted), counted)
    try:
        # Samplers may draw from a generator of their own, which stays where it is.
        return copy.deepcopy(again, memo)
    except (TypeError, RuntimeError):
        return again
