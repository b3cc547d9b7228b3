"""Whether a loader's worker processes draw random numbers.

What they draw from starts anew with them, so that no checkpoint can hold it.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from trainkit.core.generators import read_states, same_states


def draws_in_workers(loader: Any) -> bool:
    """Whether reading rows moves a worker's random generators.

    A process is started that reads two rows as the loader's workers would. What goes
    wrong in it is left to the training, which will meet it too.

    Args:
        loader: a `DataLoader`; of a stream, or of anything else, nothing is known.
    """
    if not getattr(loader, "num_workers", 0):
        return False
    dataset = loader.dataset
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        return False
    look: DataLoader[bool] = DataLoader(
        _Look(dataset, loader.collate_fn, in_batches=loader.batch_sampler is not None),
        batch_size=None,
        num_workers=1,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),  # not the one that training draws from
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return any(look)
        except Exception:
            return False


class _Look(Dataset[bool]):
    """A data set that reads rows once and returns whether random numbers were drawn."""

    def __init__(self, dataset: Any, collate: Any, *, in_batches: bool) -> None:
        self.dataset, self.collate, self.in_batches = dataset, collate, in_batches

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> bool:
        before = read_states(torch.device("cpu"))
        rows = list(range(min(2, len(self.dataset))))
        if not self.in_batches:
            self.collate(self.dataset[0])
        elif hasattr(self.dataset, "__getitems__"):
            self.collate(self.dataset.__getitems__(rows))
        else:
            self.collate([self.dataset[row] for row in rows])
        return not same_states(before, read_states(torch.device("cpu")))
