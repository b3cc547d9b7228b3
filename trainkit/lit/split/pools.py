"""Loader batches that wait, until a window has all of its own."""

from __future__ import annotations

import io
import pickle
import warnings
from typing import Any

import torch

from trainkit.core.split.micro_batching import MicroBatching
from trainkit.errors import TrainkitError
from trainkit.lit.callback.base import has_schedule
from trainkit.lit.resume.per_rank import gather, shares

KEY = "trainkit_pool"
"""The loader batches that wait, of each rank, in a checkpoint."""


Given = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""A loader batch, and what else `training_step` is given with it, by place and by
name."""


class Pools:
    """The loader batches of split windows that wait, and how many a pool has.

    Attributes:
        waiting: the loader batches of the present window before its last one, each with
            the further arguments of its `training_step`.
        are_taken: whether the last has come, and they run. They are kept until its step
            is over, for a closure that runs twice, and for checkpoints.
    """

    def __init__(self) -> None:
        self._size: int | None = None
        self._said_size: int | None = None
        self.waiting: list[Given] = []
        self.are_taken = False

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

    def start(self, options: Any, *, is_split: bool) -> None:
        """Refuse a pool that came behind `begin`: steps may have been counted. Leave
        out what waited at a checkpoint, where no window is split."""
        if (pool := _size_of(options)) != self._size:
            raise TrainkitError(
                f"MicroBatching pool: must be known before the module's setup, since "
                f"configure_optimizers may count optimizer steps, was {self._size} "
                f"then and is {pool} now. Assign micro_batching in __init__."
            )
        if self.waiting and not is_split:
            self._leave(
                "the checkpoint holds them, and this run does not cut loader batches. "
                "Resume with micro_batching, or from a checkpoint behind a step"
            )

    def end(self, trainer: Any) -> None:
        """Let the Trainer have what it had before."""
        if self._said_size is not None:
            trainer.accumulate_grad_batches, self._said_size = self._said_size, None

    def let_go(self) -> None:
        """Let go of the loader batches with which a step was made."""
        self.waiting, self.are_taken = [], False

    def save(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
        """Save the batches that wait, of each rank; every rank must call this."""
        if trainer.accumulate_grad_batches == 1 and not self.waiting:
            return
        # A run that is resumed on more ranks may have some on which nothing waits.
        held = gather(trainer, self.waiting)
        if not any(held):
            return
        checkpoint[KEY] = held
        if not _loads(self.waiting):
            warnings.warn(
                f"micro_batching: the checkpoint holds {len(self.waiting)} loader "
                f"batches that wait, of types that torch.load(weights_only=True) does "
                f"not read. Resume with fit(..., weights_only=False), or let batches "
                f"be dicts, lists and tensors.",
                stacklevel=3,
            )
        if None in held:
            warnings.warn(
                f"micro_batching: a checkpoint after an error holds only the "
                f"{len(self.waiting)} loader batches that wait on rank "
                f"{trainer.global_rank}, since the other ranks cannot be asked for "
                f"theirs. A resumed run leaves those out.",
                stacklevel=3,
            )

    def load(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
        """Restore what `save` has saved."""
        if trainer.state.fn == "fit":
            held = shares(trainer, checkpoint.get(KEY, []))
            self.waiting = [given for each in held for given in each]

    def drop(self, why: str) -> None:
        """Drop the batches that wait, and say so."""
        if self.waiting:
            self._leave(f"{why}; nothing was computed with them")

    def _leave(self, why: str) -> None:
        warnings.warn(
            f"micro_batching: {len(self.waiting)} loader batches that waited were "
            f"dropped, since {why}.",
            stacklevel=4,
        )
        self.waiting = []


def _size_of(options: Any) -> int | None:
    return options.pool if isinstance(options, MicroBatching) else None


def _loads(values: Any) -> bool:
    """Whether values can be read back as Lightning reads checkpoints."""
    file = io.BytesIO()
    torch.save(values, file)
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except pickle.UnpicklingError:
        return False
    return True
