"""Micro-batches of the training data, beside the loader that trains."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from trainkit.lit._compat import before_batch_transfer, forget_iterator
from trainkit.lit.effective import num_replicas

WHOLE = (SequentialSampler, RandomSampler, DistributedSampler)
"""Samplers that take each row of a data set once."""


def loader_of_samples(
    trainer: Any, num_batches: int, *, seed: int
) -> Callable[[], Iterable[Any]]:
    """What starts an iteration over at most so many micro-batches for each rank.

    Rows of a data set are dealt out among the ranks, none twice, as a distributed
    sampler that fills up would; where there are more than are wanted they are drawn at
    random. Other loaders are iterated anew.
    """
    loader = trainer.train_dataloader
    if not _takes_whole_dataset(loader):
        return lambda: iter(_fresh(loader))
    kwargs = trainer.distributed_sampler_kwargs or {}
    replicas, rank = num_replicas(trainer), kwargs.get("rank", 0)
    num_rows = len(loader.dataset)
    wanted = num_batches * loader.batch_size * replicas
    rows = list(range(num_rows))
    if wanted < num_rows:
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


def _fresh(loader: Any) -> Any:
    """The same loader, whose iteration does not disturb the one under way."""
    if isinstance(loader, DataLoader):
        return forget_iterator(copy.copy(loader))
    return loader
