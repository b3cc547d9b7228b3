"""The one callback that a run needs to be interrupted and resumed exactly."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from weakref import proxy

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from trainkit.core.checks import LateReading
from trainkit.core.plan.options import check_kind, check_whole_number
from trainkit.lit._compat import end_validation, follows_validation, steps_by_metric
from trainkit.lit.callback.base import Stopped, find_callback
from trainkit.lit.logs.metrics_csv import MetricRows
from trainkit.lit.resume._compat import ends_epoch, is_ending
from trainkit.lit.resume.first_signal import FirstSignal
from trainkit.lit.resume.last_checkpoint import (
    missing_places,
    refuse_same_file,
    save_atomically,
)
from trainkit.lit.resume.mid_epoch import missing_state, why_data_differ
from trainkit.lit.resume.per_rank import PerRank


class ExactResume(ModelCheckpoint):
    """Makes an interrupted run end exactly as it would have ended uninterrupted.

        trainer = Trainer(
            callbacks=[ExactResume(dirpath="runs/first")],
            logger=MetricsCSVLogger("runs/first"),
        )
        trainer.fit(module, ResumableLoader(rows, 32), ckpt_path="last")

    **It keeps one checkpoint, `last.ckpt`**, and writes it only at the moments from
    which Lightning can resume exactly. These are the end of a batch and the end of a
    validation within an epoch. Two batch ends do not count: one that a validation
    follows, because a resumed run would skip that validation; and the epoch's last one,
    because a resumed run would skip the end of the epoch (its hooks, its row of
    metrics, the schedulers that use them). A checkpoint that is due there waits for the
    next batch or the end of that validation. The module's own `on_train_batch_end` runs
    after all callbacks, and so after the checkpoint. An epoch without such a moment (of
    one batch, for example) gets one at its `on_train_epoch_end`. From there Lightning
    resumes without the schedulers that follow a metric. To keep the best checkpoint
    too, add Lightning's `ModelCheckpoint(monitor=...)`.

    **It stops a run that is asked to stop.** The first SIGINT (Ctrl+C), SIGTERM,
    SIGUSR1 or SIGUSR2 saves `last.ckpt` at the next such moment, and ends `fit` with
    `Stopped`, a `SystemExit` of status 128 + the signal's number. SIGUSR1 and SIGUSR2
    then reach the handler that they had before, by which Lightning (under SLURM) or
    submitit put the job into the queue again. The second SIGINT ends the run at once
    and leaves the last checkpoint as it is. Several ranks stop together if any of them
    got the signal; all but the first end with status 0. Validation, test and prediction
    outside of `fit` end after a batch, on each rank that got the signal itself. A run
    that ends before such a moment comes, or has taken its last step, counts as ended,
    not as stopped. Lightning's own handling of SIGTERM ends a run in states from which
    it cannot resume exactly, and lets ranks communicate inside a signal handler. It is
    switched off while the run is under way. Python delivers signals to the main thread
    only; a run in another thread is left as it is.

    **It saves what Lightning's checkpoints leave out**: see `PerRank` for random
    generators and the sums of an epoch, and `MetricRows` for the rows of a
    `MetricsCSVLogger`. It adds these two to the Trainer, where they come before all
    callbacks that save.

    Before training it warns by name of what would make a resumed run differ: a loader
    that cannot be resumed, a `CSVLogger`, a folder that the next start will not find.
    It cannot see worker processes that draw random numbers, which begin anew: seed them
    by the row's index.

    Args:
        dirpath: the folder of `last.ckpt`; default: `checkpoints` in the folder of the
            first logger.
        every_n_train_steps: how many optimizer steps lie between two checkpoints; the
            next one is written as soon as the run can resume from it. None: only a run
            that is stopped is saved, without a `dirpath` in the folder of the first
            other `ModelCheckpoint`, or not at all if there is none.
        warns: whether it warns before training.

    Attributes:
        stopped_by: the signal that ended the run, or None.
        checkpoint_path: the checkpoint from which to resume the stopped run, or None.
        caveat: what differs in the resumed run, or empty.
    """

    late_place = 3
    """After Lightning's own checkpoints, whose choice of the best it saves."""

    def __init__(
        self,
        *,
        dirpath: str | os.PathLike[str] | None = None,
        every_n_train_steps: int | None = 50,
        warns: bool = True,
    ) -> None:
        if every_n_train_steps is not None:
            check_whole_number(
                "ExactResume every_n_train_steps",
                every_n_train_steps,
                hint="50 saves after every 50 optimizer steps.",
            )
        kinds, what = (str, os.PathLike, type(None)), "a folder"
        check_kind("ExactResume dirpath", dirpath, kinds, what)
        check_kind("ExactResume warns", warns, bool, "True or False")
        super().__init__(
            None if dirpath is None else os.fspath(dirpath),
            every_n_train_steps=every_n_train_steps,
            save_last=True,
            save_top_k=0,
        )
        self.num_steps_apart, self.warns = every_n_train_steps, warns
        self._has_own_place = dirpath is not None
        self._forget()

    def _forget(self) -> None:
        self.stopped_by: signal.Signals | None = None
        self.checkpoint_path: str | None = None
        self.caveat = ""
        self._signals = FirstSignal(
            "stopping after this batch",
            on_ctrl_c="Ctrl+C again stops now, saves nothing",
        )
        self._agreed = 0  # the signal by which all ranks stop
        self._reading: LateReading | None = None
        self._saved_step = self._step_before = 0
        self._saved_batch = -1
        self._has_been_between = False  # two steps of this epoch

    @property
    def path(self) -> Path:
        """Where `last.ckpt` stands, once `fit` has found the folder."""
        name = self.CHECKPOINT_NAME_LAST + self.FILE_EXTENSION
        return Path(str(self.dirpath), name).absolute()

    @property
    def heard(self) -> int:
        """The first signal that came, even if the run then ended by itself; or 0."""
        return self._signals.heard

    @property
    def state_key(self) -> str:
        """One name for all, by which Lightning refuses a second one."""
        return ExactResume.__qualname__

    # ---- before training -------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._forget()
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self.last_model_path = ""
            ours = (PerRank, MetricRows)
            others = [each for each in trainer.callbacks if not isinstance(each, ours)]
            # A new list: Lightning is walking through the old one to call `setup`.
            both = [*others, PerRank(), MetricRows()]
            trainer.callbacks = sorted(both, key=_place)
            if trainer.precision == "64-true":
                pl_module.double()  # Lightning loads weights before it widens them

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        savers = [each for each in trainer.checkpoint_callbacks if each is not self]
        if self.num_steps_apart is not None:
            refuse_same_file(savers, self.path)
            is_chosen = self._has_own_place
            self._say(trainer, missing_places(trainer, self.path, is_chosen=is_chosen))
        elif not self._has_own_place:
            folders = [getattr(each, "dirpath", None) for each in savers]
            self.dirpath = next(filter(None, folders), None)

    def _say(self, trainer: Any, texts: Iterable[str]) -> None:
        if self.warns and trainer.is_global_zero and not trainer.fast_dev_run:
            for text in texts:
                warnings.warn(f"ExactResume: {text}", stacklevel=3)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._say(trainer, missing_state(trainer))
        # An epoch that is resumed had such a moment: the one it is resumed from.
        self._has_been_between = trainer.fit_loop.batch_idx >= 0
        self._saved_step = trainer.global_step
        self._saved_batch = trainer.fit_loop.total_batch_idx
        if trainer.received_sigterm and not self.heard:
            self._signals.heard = signal.SIGTERM  # Lightning has heard it before us
        self._signals.listen()
        self._exchange(trainer, wait=True)
        if self._agreed:
            self._stop(trainer)  # nothing has been trained: nothing to save

    # ---- while training --------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._has_been_between = False

    def on_train_batch_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self._step_before = trainer.global_step

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._exchange(trainer)
        if not (
            ends_epoch(trainer)
            or follows_validation(trainer)
            or steps_by_metric(trainer)
        ):
            self._between_steps(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        is_within = trainer.state.fn == "fit" and not trainer.sanity_checking
        if is_within and not ends_epoch(trainer):
            self._between_steps(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        # Lightning calls this when those of the module and of `EarlyStopping` are over.
        if not self._has_been_between:
            self._between_steps(trainer)
        if ends_epoch(trainer):  # a checkpoint from here lacks the epoch's end
            self._saved_batch = -1

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.num_steps_apart is not None:
            self.save(trainer)

    def _between_steps(self, trainer: Any) -> None:
        """Save and stop, if it is time to: Lightning can resume exactly from here."""
        self._has_been_between = True
        if trainer.world_size == 1:
            self._exchange(trainer)  # it may have come in a validation
        # A run that ends by itself needs no checkpoint to resume from.
        stops = self._agreed and not is_ending(trainer)
        if stops or self._is_due(trainer):
            self.save(trainer)
        if stops:
            if self.last_model_path and (why := why_data_differ(trainer)):
                self.caveat = f" (with other data than the rest of this epoch: {why})"
            self._stop(trainer)

    def _is_due(self, trainer: Any) -> bool:
        if self.num_steps_apart is None:
            return False
        step = trainer.global_step
        over = step - self._saved_step - self.num_steps_apart
        # Between windows there are no partial gradients to save. If the run could not
        # resume from a window's end, this waits for the end of the next one.
        can_wait = trainer.num_training_batches > trainer.accumulate_grad_batches
        is_between = step > self._step_before or not can_wait
        # At the end too: if the limit is raised later, the run resumes from here. It
        # cannot from the epoch's end, which comes next and skips the rest of the epoch.
        return over > 0 or (over == 0 and is_between) or is_ending(trainer)

    def save(self, trainer: Any) -> None:
        """Write `last.ckpt` if there is something new; every rank must call this."""
        batch = trainer.fit_loop.total_batch_idx
        if self.dirpath is None or trainer.fast_dev_run or batch == self._saved_batch:
            return
        self.last_model_path = str(self.path)  # loggers read it
        save_atomically(trainer, self.path)
        self._saved_step, self._saved_batch = trainer.global_step, batch
        if trainer.is_global_zero and self.num_steps_apart is not None:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(proxy(self))

    def state_dict(self) -> dict[str, Any]:
        """Nothing: it has no choice of checkpoints to remember."""
        return {}

    # ---- stopping --------------------------------------------------------------------

    def _listen(self, trainer: Any, pl_module: Any) -> None:
        self._signals.listen()

    on_sanity_check_start = on_validation_start = _listen
    on_test_start = on_predict_start = _listen

    def _after_batch(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.state.fn == "fit":
            return  # a validation is finished first
        # Here ranks may have different numbers of batches: a rank that asked the others
        # after each batch would wait for those that have no more.
        self._agreed = self.heard
        if self._agreed:
            self._stop(trainer)

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _after_batch

    def _exchange(self, trainer: Any, *, wait: bool = False) -> None:
        """Bring `_agreed` up to date; every rank must call this.

        Several ranks know of a signal one call later, so that none waits for the
        device, unless it shall `wait`.
        """
        if trainer.world_size == 1 or not dist.is_initialized():
            self._agreed = self.heard
            return
        before = self._reading
        heard = torch.tensor(self.heard, device=trainer.strategy.root_device)
        dist.all_reduce(heard, op=dist.ReduceOp.MAX)
        self._reading = LateReading(heard)
        known = self._reading if wait else before
        if known is not None:
            self._agreed = int(known.values())

    def _stop(self, trainer: Any) -> None:
        self._note(trainer, self._agreed)
        if trainer.state.fn != "fit":
            raise Stopped(128 + self._agreed)
        if trainer.validating:
            end_validation(trainer)  # the module may be trained on in this process
        self._signals.hand_on(self._agreed)
        # If Lightning has started the ranks, it kills the first one when another ends
        # with a status other than 0. All stop together, so the first one's counts.
        raise Stopped(128 + self._agreed if trainer.is_global_zero else 0)

    def on_exception(
        self, trainer: Any, pl_module: Any, exception: BaseException
    ) -> None:
        """Note the signal if Lightning stopped the run; save nothing, because the state
        is torn."""
        if self.stopped_by is None and isinstance(exception, KeyboardInterrupt):
            self._note(trainer, signal.SIGINT)
        elif self.stopped_by is None and isinstance(exception, SIGTERMException):
            self._note(trainer, signal.SIGTERM)

    def _note(self, trainer: Any, number: int) -> None:
        self.stopped_by = signal.Signals(number)
        if trainer.state.fn == "fit":
            path = self.last_model_path or trainer.ckpt_path
            self.checkpoint_path = None if path is None else str(path)


def add_exact_resume(
    callbacks: Sequence[Callback], dirpath: str | os.PathLike[str] | None = None
) -> list[Callback]:
    """The callbacks, and an `ExactResume` that saves a run which is stopped, unless
    there is one.

    Args:
        callbacks: the run's callbacks.
        dirpath: the folder of its checkpoint.
    """
    if any(isinstance(each, ExactResume) for each in callbacks):
        return [*callbacks]
    how: Any = {"every_n_train_steps": None, "warns": False}
    return [*callbacks, ExactResume(dirpath=dirpath, **how)]


def find_stop(trainer: Any) -> ExactResume:
    """The callback that stops a run; a module may have brought another to `fit`."""
    stop = find_callback(trainer, ExactResume)
    assert stop is not None
    return stop


def _place(callback: Any) -> int:
    """Callbacks that save come last, so that what they save is complete.

    Those with a `late_place` above 2 come after Lightning's own checkpoints; those with
    1 come before these.
    """
    others = 2 if isinstance(callback, Checkpoint) else 0
    return getattr(callback, "late_place", others)
