"""Pools: loader batches that wait until they are cut together, for one step."""

from __future__ import annotations

import warnings
from typing import Any

from trainkit.core.split.micro_batching import MicroBatching
from trainkit.errors import TrainkitError

KEY = "trainkit_pool"
"""The loader batches that wait, of each rank, in a checkpoint."""


def num_cuts(trainer: Any, options: MicroBatching | None) -> int:
    """How often something is cut for one step: each loader batch, or a pool once."""
    has_pool = options is not None and options.pool is not None
    return 1 if has_pool else trainer.accumulate_grad_batches


def begin_pools(trainer: Any, options: Any) -> int | None:
    """Let Lightning step once for each pool; returns what the Trainer said before, None
    where there are no pools.

    Raises:
        TrainkitError: the Trainer says something else.
    """
    pool = options.pool if isinstance(options, MicroBatching) else None
    if pool is None:
        return None
    before = trainer.accumulate_grad_batches
    if before not in (1, pool):
        raise _other_size(pool, before)
    trainer.accumulate_grad_batches = pool
    return before


def say_pool_dropped(held: int, why: str) -> None:
    warnings.warn(
        f"MicroBatching pool: {held} loader batches that waited were dropped, since "
        f"{why}; nothing was computed with them.",
        stacklevel=3,
    )


def refuse_other_size(trainer: Any, pool: int) -> None:
    """Refuse windows that a schedule has made longer or shorter."""
    if trainer.accumulate_grad_batches != pool:
        raise _other_size(pool, trainer.accumulate_grad_batches)


def _other_size(pool: int, asked: int) -> TrainkitError:
    return TrainkitError(
        f"MicroBatching pool={pool}: it makes one step of {pool} loader batches, so "
        f"accumulate_grad_batches must be 1 or {pool}, received {int(asked)}. Leave it "
        f"out of the Trainer, and leave schedules of it out."
    )
