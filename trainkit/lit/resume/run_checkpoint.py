"""`last.ckpt`: the checkpoint from which an interrupted run resumes exactly."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any
from weakref import proxy

from lightning.pytorch.callbacks import ModelCheckpoint

from trainkit.core.whole_number import check_whole_number
from trainkit.errors import TrainkitError
from trainkit.lit._compat import is_ending
from trainkit.lit.resume.between_steps import AtCleanMoments, put_in_order


class RunCheckpoint(AtCleanMoments, ModelCheckpoint):
    """Keeps one checkpoint, `last.ckpt`, from which a run resumes exactly.

        Trainer(callbacks=[
            RunCheckpoint(every_n_train_steps=50),
            RandomState(), EpochSums(), MetricRows(), GracefulStop(),
        ])
        trainer.fit(module, ckpt_path="last")

    It is written under another name and put in its place in one step, so that there is
    a whole one at every moment (of a sharded one, which is a folder, it takes two, and
    between them the one before is `last.ckpt.old`). It is written only where Lightning
    can resume exactly (a clean moment, see `AtCleanMoments`), and at the end of
    training. To keep the best one too, add Lightning's `ModelCheckpoint(monitor=...)`.

    Args:
        dirpath: its folder; default: `checkpoints` in the folder of the first logger.
        every_n_train_steps: how many optimizer steps apart, or the next clean moment
            after that.
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
        # Between windows there are no partial gradients to save. Where a window's end
        # was no clean moment it waits for the next one's, and then no longer.
        can_wait = trainer.num_training_batches > trainer.accumulate_grad_batches
        is_between = step > self._step_before or not can_wait
        if over > 0 or (over == 0 and is_between):
            self.save(trainer)
        elif is_ending(trainer):
            # The run resumes from here, should the limit be raised; not from the
            # epoch's end, which comes next and leaves the rest of the epoch out.
            self.save(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.save(trainer)

    def on_exception(
        self, trainer: Any, pl_module: Any, exception: BaseException
    ) -> None:
        """Save nothing, since the state is torn; the last checkpoint stays."""

    def save(self, trainer: Any) -> None:
        """Write `last.ckpt`, if there is something new; to be called by every rank."""
        batch = trainer.fit_loop.total_batch_idx
        if trainer.fast_dev_run or batch == self._saved_batch:
            return
        self.last_model_path = str(self.path)  # Lightning saves it with the rest
        save_whole(trainer, self.path)
        self._saved_step, self._saved_batch = trainer.global_step, batch
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(proxy(self))


def save_whole(trainer: Any, path: Path) -> None:
    """Write a checkpoint that exists completely or not at all.

    Lightning writes it in the system's temporary folder and moves it; where that is
    another file system, this is a copy, and a killed process leaves a part of one.
    """
    part = path.with_name(path.name + ".part")
    trainer.save_checkpoint(part)
    if trainer.is_global_zero:
        if not part.exists():
            raise TrainkitError(
                f"RunCheckpoint: a checkpoint must be written when it has been saved, "
                f"and {part} is not there. Leave out AsyncCheckpointIO and the like."
            )
        _put_in_place(part, path)
    trainer.strategy.barrier("trainkit.save_whole")


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
