"""Pools: loader batches that wait until they are cut together, for one step."""

from __future__ import annotations

import warnings
from typing import Any

from trainkit.core.split.micro_batching import MicroBatching
from trainkit.errors import TrainkitError
from trainkit.lit.callback.base import has_schedule
from trainkit.lit.resume.per_rank import gather, shares

KEY = "trainkit_pool"
"""The loader batches that wait, of each rank, in a checkpoint."""


def num_cuts(trainer: Any, options: MicroBatching | None) -> int:
    """How often something is cut for one step: each loader batch, or a pool once."""
    has_pool = options is not None and options.pool is not None
    return 1 if has_pool else trainer.accumulate_grad_batches


class Pools:
    """The pools of a training: how many batches they have, and those that wait.

    Attributes:
        waiting: the loader batches of a pool that is not full.
    """

    def __init__(self) -> None:
        self._size: int | None = None
        self._said_size: int | None = None
        self.waiting: list[Any] = []

    def begin(self, trainer: Any, options: Any) -> None:
        """Let Lightning step once for each pool, if there are pools.

        To be called in `setup`, before `configure_optimizers` counts steps.

        Raises:
            TrainkitError: the Trainer says something else.
        """
        self._size = pool = _size_of(options)
        if pool is None:
            return
        before = trainer.accumulate_grad_batches
        is_scheduled = has_schedule(trainer)
        if before not in (1, pool) or is_scheduled:
            raise TrainkitError(
                f"MicroBatching pool={pool}: it makes one step of {pool} loader "
                f"batches, so accumulate_grad_batches must be 1 or {pool}, received "
                f"{int(before)}"
                f"{', and a schedule that changes it' if is_scheduled else ''}. Leave "
                f"it out of the Trainer, and leave schedules of it out."
            )
        trainer.accumulate_grad_batches, self._said_size = pool, before

    def start(self, options: Any) -> None:
        """Refuse a pool that came behind `begin`: steps may have been counted. Leave
        out what waited at a checkpoint, where there is no pool."""
        if (pool := _size_of(options)) != self._size:
            raise TrainkitError(
                f"MicroBatching pool: must be known before the module's setup, since "
                f"configure_optimizers may count optimizer steps, was {self._size} "
                f"then and is {pool} now. Assign micro_batching in __init__."
            )
        if self.waiting and pool is None:
            warnings.warn(
                f"MicroBatching pool: the checkpoint holds {len(self.waiting)} loader "
                f"batches that waited, and this run has no pool, so it leaves them "
                f"out. Resume with the pool, or from a checkpoint behind a step.",
                stacklevel=3,
            )
            self.waiting = []

    def end(self, trainer: Any) -> None:
        """Let the Trainer have what it had before."""
        if self._said_size is not None:
            trainer.accumulate_grad_batches, self._said_size = self._said_size, None

    def save(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
        """Save the batches that wait, of each rank; every rank must call this."""
        if self._size is None:
            return
        checkpoint[KEY] = gather(trainer, self.waiting)
        if self.waiting and None in checkpoint[KEY]:
            warnings.warn(
                f"MicroBatching pool: a checkpoint after an error holds only the "
                f"{len(self.waiting)} loader batches that wait on rank "
                f"{trainer.global_rank}, since the other ranks cannot be asked for "
                f"theirs. A resumed run leaves those out.",
                stacklevel=3,
            )

    def load(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
        """Restore what `save` has saved."""
        if trainer.state.fn == "fit":
            held = shares(trainer, checkpoint.get(KEY, []))
            self.waiting = [batch for each in held for batch in each]

    def drop(self, why: str) -> None:
        """Drop the batches that wait, and say so."""
        if self.waiting:
            warnings.warn(
                f"MicroBatching pool: {len(self.waiting)} loader batches that waited "
                f"were dropped, since {why}; nothing was computed with them.",
                stacklevel=3,
            )
            self.waiting = []


def _size_of(options: Any) -> int | None:
    return options.pool if isinstance(options, MicroBatching) else None
