"""A few samples from all over the data set of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from trainkit.core.generators import random_kept
from trainkit.core.nested import take_apart
from trainkit.lit.probe.rows import rows_at
from trainkit.lit.proof.copying import read_apart


def samples_across(loader: Any, number: int, collate: Any) -> list[Any]:
    """Rows from all over a data set, and the next of each; none if it cannot be read,
    or if the collate function draws at random, so that no two batches are alike."""
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return []
    if isinstance(loader.dataset, IterableDataset):
        return []
    with contextlib.suppress(Exception), random_kept():
        last: int = len(loader.dataset) - 1  # type: ignore[arg-type]
        firsts = {round(n * last / (number // 2)) for n in range(number // 2 + 1)}
        indices = firsts | {min(each + 1, last) for each in firsts}
        rows = list(rows_at(read_apart(loader.dataset), sorted(indices)))
        return rows if _repeats(collate, rows) else []
    return []


def _repeats(collate: Callable[[list[Any]], Any], rows: list[Any]) -> bool:
    """Whether a collate function makes the same batch of the same rows again."""
    pairs = zip(*(take_apart(collate(list(rows)))[0] for _ in range(2)), strict=True)
    return all(
        torch.equal(one.nan_to_num(), other.nan_to_num())
        for (_, one), (_, other) in pairs
        if isinstance(one, Tensor)
    )


def collates_by_itself(loader: Any) -> bool:
    """Whether a loader has a collate function of its own."""
    own = getattr(loader, "collate_fn", default_collate)
    return getattr(own, "__module__", "").partition(".")[0] != "torch"
