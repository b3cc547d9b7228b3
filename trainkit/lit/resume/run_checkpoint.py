"""`last.ckpt`: when a run can be resumed exactly, and the checkpoint of that moment."""

from __future__ import annotations

import os
import shutil
from abc import abstractmethod
from pathlib import Path
from typing import Any
from weakref import proxy

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from trainkit.core.plan.options import check_kind, check_whole_number
from trainkit.errors import TrainkitError
from trainkit.lit._compat import follows_validation, steps_by_metric
from trainkit.lit.callback.base import find_callback
from trainkit.lit.resume._compat import (
    end_restart,
    is_ending,
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
    follow a metric.
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

    def on_train_batch_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
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
        # Lightning calls this hook of a RunCheckpoint when those of the module and of
        # `EarlyStopping` are over. So it calls the others of ours, too.
        saver, ours = find_callback(trainer, RunCheckpoint), [self]
        if saver is not None:
            all_of_ours = [c for c in trainer.callbacks if isinstance(c, BetweenSteps)]
            ours = all_of_ours if saver is self else []
        for each in ours:
            if not each._has_been:
                each.between_steps(trainer, pl_module)


class RunCheckpoint(BetweenSteps, ModelCheckpoint):
    """Keeps one checkpoint, `last.ckpt`, from which a run resumes exactly.

        Trainer(callbacks=[
            RunCheckpoint(every_n_train_steps=50),
            RandomState(), EpochSums(), MetricRows(), GracefulStop(),
        ])
        trainer.fit(module, ckpt_path="last")

    The file is written under another name and then renamed, so that a complete
    checkpoint exists at every moment. (A sharded checkpoint is a folder, which takes
    two steps; between them the previous one is `last.ckpt.old`.) It is written only
    where Lightning can resume exactly (see `BetweenSteps`), and at the end of training.
    To keep the best checkpoint too, add Lightning's `ModelCheckpoint(monitor=...)`.

    Args:
        dirpath: its folder; default: `checkpoints` in the folder of the first logger.
        every_n_train_steps: how many optimizer steps lie between two checkpoints; the
            next one is written as soon as the run can resume from it.
    """

    late_place = 3

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        *,
        every_n_train_steps: int = 50,
    ) -> None:
        check_whole_number(
            "RunCheckpoint every_n_train_steps",
            every_n_train_steps,
            hint="50 saves after every 50 optimizer steps.",
        )
        kinds, what = (str, os.PathLike, type(None)), "a folder"
        check_kind("RunCheckpoint dirpath", dirpath, kinds, what)
        super().__init__(
            None if dirpath is None else os.fspath(dirpath),
            every_n_train_steps=every_n_train_steps,
            save_last=True,
            save_top_k=0,
        )
        self.num_steps_apart = every_n_train_steps
        self._saved_step = 0
        self._saved_batch = -1
        self._step_before = 0

    @property
    def path(self) -> Path:
        """Where `last.ckpt` stands, once `setup` has found the folder."""
        assert self.dirpath is not None
        return Path(self.dirpath, self.CHECKPOINT_NAME_LAST + self.FILE_EXTENSION)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        put_in_order(trainer)
        if trainer.precision == "64-true":
            pl_module.double()  # Lightning loads weights before it widens them

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self._saved_step = trainer.global_step
        self._saved_batch = trainer.fit_loop.total_batch_idx

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._step_before = trainer.global_step

    def between_steps(self, trainer: Any, pl_module: Any) -> None:
        step = trainer.global_step
        over = step - self._saved_step - self.num_steps_apart
        # Between windows there are no partial gradients to save. If the run could not
        # resume from a window's end, this waits for the end of the next one.
        can_wait = trainer.num_training_batches > trainer.accumulate_grad_batches
        is_between = step > self._step_before or not can_wait
        # At the end too: if the limit is raised later, the run resumes from here. It
        # cannot from the epoch's end, which comes next and skips the rest of the epoch.
        if over > 0 or (over == 0 and is_between) or is_ending(trainer):
            self.save(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        if ends_epoch(trainer):  # a checkpoint from here lacks the epoch's end
            self._saved_batch = -1

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.save(trainer)

    def on_exception(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Save nothing, since the state is torn; the last checkpoint stays."""

    def save(self, trainer: Any) -> None:
        """Write `last.ckpt` if there is something new; every rank must call this."""
        batch = trainer.fit_loop.total_batch_idx
        if trainer.fast_dev_run or batch == self._saved_batch:
            return
        self.last_model_path = str(self.path)  # Lightning saves it with the rest
        save_atomically(trainer, self.path)
        self._saved_step, self._saved_batch = trainer.global_step, batch
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(proxy(self))


def save_atomically(trainer: Any, path: Path) -> None:
    """Write a checkpoint that exists completely or not at all.

    Lightning writes it in the system's temporary folder and moves it. If that is
    another file system, moving is copying, and a killed process leaves a part of it.
    """
    part = path.with_name(path.name + ".part")
    try:
        trainer.save_checkpoint(part, weights_only=False)
    except OSError:
        if trainer.is_global_zero:
            _remove(part)  # it takes room that others need
        raise
    if trainer.is_global_zero:
        if not part.exists():
            raise TrainkitError(
                f"RunCheckpoint: a checkpoint must be written when it has been saved, "
                f"and {part} is not there. Leave out AsyncCheckpointIO and the like."
            )
        _put_in_place(part, path)
    trainer.strategy.barrier("trainkit.save_atomically")


def _put_in_place(part: Path, path: Path) -> None:
    if not path.is_dir() and not (path.exists() and part.is_dir()):
        os.replace(part, path)
        return
    # Sharded checkpoints are folders, which no system replaces in one step.
    old = path.with_name(path.name + ".old")
    _remove(old)
    os.replace(path, old)
    os.replace(part, path)
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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
