"""What Lightning's checkpoints leave out, and each rank saves for itself."""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback

from trainkit.core.generators import read_states, write_states
from trainkit.lit._compat import add_callback_metrics
from trainkit.lit.resume import _compat


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


class RandomState(Callback):
    """Saves the states of all random generators, each rank's own, and restores them.

    These are Python's, NumPy's, torch's and the device's generators. So dropout
    continues exactly in a resumed run, and so do augmentations of a dataset read
    without workers. They are restored when training begins, after all that Lightning
    draws on the way there.

    A `DataLoader` with `shuffle=True` draws its order from torch's generator when an
    epoch begins, so it cannot be resumed within an epoch. A `ResumableLoader` can, and
    draws nothing.
    """

    KEY = "trainkit_random"
    """The entry in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self._restored: list[Any] = []

    def on_save_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[self.KEY] = gather(trainer, read_states(pl_module.device))

    def on_load_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == "fit":
            self._restored = checkpoint.get(self.KEY, [])

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        _compat.restore_loaders(trainer)
        states, self._restored = self._restored, []
        mine = states[trainer.global_rank : trainer.global_rank + 1]
        if mine and mine[0] is not None:
            write_states(mine[0], pl_module.device)
        elif states:
            warnings.warn(
                f"RandomState: the checkpoint holds the random generators of "
                f"{sum(s is not None for s in states)} ranks, but not of rank "
                f"{trainer.global_rank}, which keeps the generators that it has. What "
                f"it draws at random differs from an uninterrupted run.",
                stacklevel=2,
            )


class EpochSums(Callback):
    """Saves what `self.log(..., on_epoch=True)` has added up in `training_step`.

    Lightning's checkpoints leave these sums out, so after a resume within an epoch its
    mean would cover only the rest. Here each rank continues its own sums. On fewer
    ranks than before, the sums of missing ranks are shared out.
    `trainer.callback_metrics` is restored too, since schedulers and early stopping read
    it. What a `torchmetrics` object has seen is not saved; a warning says so.
    """

    KEY = "trainkit_epoch_sums"
    """The entry in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[str, list[Any]] = {}
        self._metrics: dict[str, Any] = {}

    def on_save_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        found = _compat.epoch_sums(trainer).items()
        mine = {key: [_compat.sum_state(result)] for key, result in found}
        metrics = {k: v.detach().cpu() for k, v in trainer.callback_metrics.items()}
        # What has not been logged again since the resume still waits.
        state = {"sums": {**self._before, **mine}, "metrics": metrics}
        checkpoint[self.KEY] = gather(trainer, state)

    def on_load_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        self._before, self._metrics = {}, {}
        if trainer.state.fn != "fit":
            return
        for state in reversed(shares(trainer, checkpoint.get(self.KEY, []))):
            self._metrics = state["metrics"]  # this rank's own come first in the list
            if _compat.batches_into_epoch(checkpoint):
                for key, sums in state["sums"].items():
                    self._before.setdefault(key, []).extend(sums)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # Not before: Lightning clears them on its way here.
        add_callback_metrics(trainer, self._metrics)
        self._metrics = {}
        objects = sorted(key for key, sums in self._before.items() if None in sums)
        for key in objects:
            del self._before[key]
        if objects:
            warnings.warn(
                f"EpochSums: the checkpoint was taken within an epoch and does not "
                f"hold what the metric objects of {', '.join(objects)} had seen, so "
                f"their values cover only the rest of this epoch.",
                stacklevel=2,
            )

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if self._before:
            for key, result in _compat.epoch_sums(trainer).items():
                for state in self._before.pop(key, []):
                    _compat.add_sum_state(result, state)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.on_train_batch_end(trainer)
        if self._before:
            warnings.warn(
                f"EpochSums: {', '.join(sorted(self._before))} was logged before the "
                f"run was resumed and not after that, so its mean for this epoch is "
                f"not logged.",
                stacklevel=2,
            )
        self._before = {}
