"""The moments at which a checkpoint holds all that makes the resumed run the same."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint

from trainkit.lit._compat import (
    end_restart,
    follows_validation,
    leave_ended_epoch,
    restore_loaders,
    steps_by_metric,
)


class AtCleanMoments(Callback):
    """Calls `at_clean_moment` where Lightning goes on exactly from a checkpoint.

    That is at the end of a batch, and at the end of a validation within an epoch. Left
    out are a batch's end with a validation to follow, which a resumed run would leave
    out, and an epoch's last batch, whose end it would leave out: the epoch's hooks, its
    row of metrics, the schedulers that go by these. A checkpoint that falls due there
    waits for the next batch or the end of that validation. What the module does in its
    own `on_train_batch_end` comes after all callbacks, and so after the checkpoint.

    An epoch that has no such moment, since it is one batch long, say, gets one at its
    `on_train_epoch_end`: from there Lightning goes on without the schedulers that go by
    a metric, and with `max_steps` it counts that epoch twice.
    """

    _has_been = False

    @abstractmethod
    def at_clean_moment(self, trainer: Any, pl_module: Any) -> None:
        """Save, stop, or do nothing."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        restore_loaders(trainer)
        leave_ended_epoch(trainer)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        end_restart(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
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
            self.at_clean_moment(trainer, pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        is_within = trainer.state.fn == "fit" and not trainer.sanity_checking
        if is_within and not ends_epoch(trainer):
            self._has_been = True
            self.at_clean_moment(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if not self._has_been:
            self.at_clean_moment(trainer, pl_module)


def ends_epoch(trainer: Any) -> bool:
    """Whether the batch under way is the last one of its epoch."""
    num_batches = trainer.num_training_batches
    return trainer.is_last_batch or trainer.fit_loop.batch_idx + 1 == num_batches


def put_in_order(trainer: Any) -> None:
    """Last come those that save, so that what they save is complete.

    Callbacks of a `late_place` above 2 come after Lightning's own checkpoints, whose
    choice of the best they save; one of 1 comes before these.
    """

    def place(callback: Any) -> int:
        others = 2 if isinstance(callback, Checkpoint) else 0
        return getattr(callback, "late_place", others)

    # A new list: Lightning is walking through the old one to call `setup`.
    trainer.callbacks = sorted(trainer.callbacks, key=place)
