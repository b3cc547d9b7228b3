"""What Lightning's checkpoints leave out, and each rank saves for itself."""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback

from trainkit.core.generators import read_states, write_states
from trainkit.lit._compat import add_callback_metrics
from trainkit.lit.callback.base import windows_of
from trainkit.lit.resume import _compat, mid_epoch


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


class PerRank(Callback):
    """Saves random generators and the sums of an epoch, each rank its own.

    The generators are Python's, NumPy's, torch's and the device's. So dropout continues
    exactly in a resumed run, and so do augmentations of a dataset read without workers.
    They are restored when training begins, after all that Lightning draws on the way
    there.

    The sums are what `self.log(..., on_epoch=True)` has added up in `training_step`.
    Without them the mean of a resumed epoch would cover only its rest. On fewer ranks
    than before, the sums of missing ranks are shared out. `trainer.callback_metrics` is
    restored too, since schedulers and early stopping read it. What a `torchmetrics`
    object has seen is not saved; a warning says so.
    """

    KEY = "trainkit_ranks"
    """The entry in a checkpoint."""

    late_place = 1
    """Before Lightning's own checkpoints, which read the means that it restores."""

    def __init__(self) -> None:
        super().__init__()
        self._saved: list[Any] = []
        self._before: dict[str, list[Any]] = {}

    def on_save_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        self.on_train_batch_end(trainer)  # if a callback that saves stands before
        found = _compat.epoch_sums(trainer).items()
        mine = {key: [_compat.sum_state(result)] for key, result in found}
        metrics = trainer.callback_metrics.items()
        state = {
            "random": read_states(pl_module.device),
            # What has not been logged again since the resume still waits.
            "sums": {**self._before, **mine},
            "metrics": {name: value.detach().cpu() for name, value in metrics},
        }
        checkpoint[self.KEY] = gather(trainer, state)

    def on_load_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        self._before = {}
        if trainer.state.fn != "fit":
            return
        self._saved = checkpoint.get(self.KEY, [])
        if _compat.batches_into_epoch(checkpoint):
            for state in shares(trainer, self._saved):
                for key, sums in state["sums"].items():
                    self._before.setdefault(key, []).extend(sums)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if windows_of(trainer) is None:  # whose callback does it otherwise
            mid_epoch.resume(trainer, pl_module)
        saved, self._saved = self._saved, []
        rank = trainer.global_rank
        mine = saved[rank] if rank < len(saved) else None
        if mine is not None:
            write_states(mine["random"], pl_module.device)
        elif saved:
            warnings.warn(
                f"ExactResume: the checkpoint holds the random generators of "
                f"{sum(each is not None for each in saved)} ranks, but not of rank "
                f"{rank}, which keeps the generators that it has. What it draws at "
                f"random differs from an uninterrupted run.",
                stacklevel=2,
            )
        for state in shares(trainer, saved)[:1]:  # its own, if it is there
            # Not before: Lightning clears them on its way here.
            add_callback_metrics(trainer, state["metrics"])
        objects = sorted(key for key, sums in self._before.items() if None in sums)
        for key in objects:
            del self._before[key]
        if objects:
            warnings.warn(
                f"ExactResume: the checkpoint was taken within an epoch and does not "
                f"hold what the metric objects of {', '.join(objects)} had seen, so "
                f"their values cover only the rest of this epoch.",
                stacklevel=2,
            )

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        _compat.tell_streams(trainer)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        mid_epoch.begin_batch(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if self._before:
            for key, result in _compat.epoch_sums(trainer).items():
                for state in self._before.pop(key, []):
                    _compat.add_sum_state(result, state)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.on_train_batch_end(trainer)
        if self._before:
            warnings.warn(
                f"ExactResume: {', '.join(sorted(self._before))} was logged before the "
                f"run was resumed and not after that, so its mean for this epoch is "
                f"not logged.",
                stacklevel=2,
            )
        self._before = {}
