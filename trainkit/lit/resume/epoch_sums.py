"""The sums of `self.log` over an epoch, saved for a run that resumes within it."""

from __future__ import annotations

import warnings
from typing import Any

from lightning.pytorch import Callback

from trainkit.lit import _compat
from trainkit.lit.resume.rank_states import gather, own, shares

KEY = "trainkit_epoch_sums"
"""The entry in a checkpoint."""


class EpochSums(Callback):
    """Saves what `self.log(..., on_epoch=True)` has added up in `training_step`.

    Lightning's checkpoints leave these sums out, so after a resume within an epoch its
    mean would cover only the rest. Here each rank continues its own sums. On fewer
    ranks than before, the sums of missing ranks are shared out.
    `trainer.callback_metrics` is restored too, since schedulers and early stopping read
    it. What a `torchmetrics` object has seen is not saved; a warning says so.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[str, list[Any]] = {}
        self._metrics: dict[str, Any] = {}

    def on_save_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        mine = {
            key: [_compat.sum_state(result)]
            for key, result in _compat.epoch_sums(trainer).items()
        }
        # What has not been logged again since the resume still waits.
        metrics = {
            name: value.detach().cpu()
            for name, value in trainer.callback_metrics.items()
        }
        state = {"sums": {**self._before, **mine}, "metrics": metrics}
        checkpoint[KEY] = gather(trainer, state)

    def on_load_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        self._before, self._metrics = {}, {}
        states = checkpoint.get(KEY, [])
        if trainer.state.fn != "fit":
            return
        mine = own(trainer, states)
        self._metrics = {} if mine is None else mine["metrics"]
        if not _compat.batches_into_epoch(checkpoint):
            return
        for state in shares(trainer, states):
            for key, sums in state["sums"].items():
                self._before.setdefault(key, []).extend(sums)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # Not before: Lightning clears them on its way here.
        _compat.add_callback_metrics(trainer, self._metrics)
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

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._add(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._add(trainer)
        if self._before:
            warnings.warn(
                f"EpochSums: {', '.join(sorted(self._before))} was logged before the "
                f"run was resumed and not after that, so its mean for this epoch is "
                f"not logged.",
                stacklevel=2,
            )
        self._before = {}

    def _add(self, trainer: Any) -> None:
        if not self._before:
            return
        for key, result in _compat.epoch_sums(trainer).items():
            if key in self._before:
                for state in self._before.pop(key):
                    _compat.add_sum_state(result, state)
