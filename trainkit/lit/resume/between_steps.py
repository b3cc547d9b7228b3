"""The moments between steps at which a checkpoint lets a run resume exactly."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint

from trainkit.lit._compat import follows_validation, steps_by_metric
from trainkit.lit.resume._compat import (
    end_restart,
    leave_ended_epoch,
    restore_loaders,
    tell_streams,
)


class BetweenSteps(Callback):
    """Calls `between_steps` at the moments from which Lightning can resume exactly.

    These are the end of a batch and the end of a validation within an epoch. Two batch
    ends do not count: one that a validation follows, because a resumed run would skip
    that validation; and the epoch's last one, because a resumed run would skip the end
    of the epoch (its hooks, its row of metrics, the schedulers that use them). A
    checkpoint that is due there waits for the next batch or the end of that validation.
    The module's own `on_train_batch_end` runs after all callbacks, and so after the
    checkpoint.

    An epoch without such a moment (of one batch, for example) gets one at its
    `on_train_epoch_end`. From there Lightning resumes without the schedulers that
    follow a metric, and with `max_steps` it counts that epoch twice.
    """

    _has_been = False

    @abstractmethod
    def between_steps(self, trainer: Any, pl_module: Any) -> None:
        """Save, stop, or do nothing."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        restore_loaders(trainer)
        leave_ended_epoch(trainer)
        # An epoch that is resumed had such a moment: the one it is resumed from.
        self._has_been = trainer.fit_loop.batch_idx >= 0

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        end_restart(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        tell_streams(trainer)
        self._has_been = False

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not (
            ends_epoch(trainer)
            or follows_validation(trainer)
            or steps_by_metric(trainer)
        ):
            self._has_been = True
            self.between_steps(trainer, pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        is_within = trainer.state.fn == "fit" and not trainer.sanity_checking
        if is_within and not ends_epoch(trainer):
            self._has_been = True
            self.between_steps(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if not self._has_been:
            self.between_steps(trainer, pl_module)


def ends_epoch(trainer: Any) -> bool:
    """Whether the batch under way is the last one of its epoch."""
    num_batches = trainer.num_training_batches
    return trainer.is_last_batch or trainer.fit_loop.batch_idx + 1 == num_batches


def put_in_order(trainer: Any) -> None:
    """Move the callbacks that save to the end, so that what they save is complete.

    Callbacks with a `late_place` above 2 come after Lightning's own checkpoints and
    save their choice of the best. Callbacks with 1 come before these.
    """

    def place(callback: Any) -> int:
        others = 2 if isinstance(callback, Checkpoint) else 0
        return getattr(callback, "late_place", others)

    # A new list: Lightning is walking through the old one to call `setup`.
    trainer.callbacks = sorted(trainer.callbacks, key=place)
