"""The entries of a checkpoint that differ between ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def gather(trainer: Any, value: Any) -> list[Any]:
    """The values of all ranks, in their order; to be called by every rank.

    After an exception the other ranks may not come: then only this one's is known.
    """
    if trainer.world_size == 1 or trainer.interrupted or not dist.is_initialized():
        values: list[Any] = [None] * trainer.world_size
        values[trainer.global_rank] = value
        return values
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def shares(trainer: Any, values: list[Any]) -> list[Any]:
    """The values for this rank: its own, and its share of those of missing ranks."""
    mine = values[trainer.global_rank :: trainer.world_size]
    return [each for each in mine if each is not None]


def own(trainer: Any, values: list[Any]) -> Any:
    """This rank's value, or None where the checkpoint holds none for it."""
    rank = trainer.global_rank
    return values[rank] if rank < len(values) else None
