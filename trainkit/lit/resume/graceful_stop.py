"""Signals that ask a run to stop, and the callback that stops and saves it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from trainkit.core.checks import LateReading
from trainkit.lit._compat import end_validation
from trainkit.lit.callback.base import Stopped, find_callback
from trainkit.lit.resume._compat import is_ending
from trainkit.lit.resume.mid_epoch import why_data_differ
from trainkit.lit.resume.run_checkpoint import (
    BetweenSteps,
    RunCheckpoint,
    put_in_order,
    save_atomically,
)

PREEMPTION = tuple(
    signal.Signals[name]
    for name in ("SIGUSR1", "SIGUSR2")
    if name in signal.Signals.__members__
)
"""By these a cluster says that it takes the machine away: Lightning asks SLURM for the
first, submitit for either of them."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, *PREEMPTION)


class FirstSignal:
    """The first of `SIGNALS` that this process gets.

    A second Ctrl+C raises KeyboardInterrupt. A signal that the handler before has noted
    as its `heard`, and that has not ended the process, counts as the first.

    Attributes:
        heard: the signal, or 0.
    """

    def __init__(self, announcement: str, *, on_ctrl_c: str) -> None:
        """
        Args:
            announcement: what happens now; printed when the signal comes.
            on_ctrl_c: what a second Ctrl+C does; printed after a first one.
        """
        self.heard = 0
        self._announcement = announcement
        self._on_ctrl_c = on_ctrl_c
        self._process = -1
        self._earlier: dict[int, Callable[..., Any]] = {}

    def listen(self) -> None:
        """Handle the signals from now on; outside of the main thread Python forbids it.

        Within `fit`, call this once the Trainer has set its own handlers and has noted
        the earlier ones, which it restores when the run ends, however it ends.
        """
        if threading.current_thread() is threading.main_thread():
            self._process = os.getpid()
            for each in SIGNALS:
                before = signal.signal(each, self._hear)
                self.heard = self.heard or getattr(before, "heard", 0)
                is_ours = getattr(before, "__func__", None) is FirstSignal._hear
                if each in PREEMPTION and callable(before) and not is_ours:
                    self._earlier[each] = before

    def hand_on(self, number: int) -> None:
        """Call the handler that a signal of preemption had before, if it had one: those
        of Lightning and submitit put the job into the queue again."""
        if number in self._earlier:
            self._earlier[number](number, None)

    def _hear(self, number: int, frame: Any) -> None:
        if os.getpid() != self._process:
            _hear_in_worker(number)
        elif not self.heard:
            self.heard = number
            again = f"; {self._on_ctrl_c}" if number == signal.SIGINT else ""
            name = signal.Signals(number).name
            text = f"\ntrainkit | {name}: {self._announcement}{again}\n"
            os.write(2, text.encode())  # print may be what the signal interrupted
        elif number == signal.SIGINT:
            raise KeyboardInterrupt


def _hear_in_worker(number: int) -> None:
    """Handle a signal in a loader's worker, which inherits the handler.

    Ctrl+C and a cluster's signals reach it too, and it must work until the run has
    stopped; SIGTERM ends it.
    """
    if number == signal.SIGTERM:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


class GracefulStop(BetweenSteps):
    """Ends a run that is asked to stop, after the batch or validation under way.

    The first SIGINT (Ctrl+C), SIGTERM, SIGUSR1 or SIGUSR2 saves `last.ckpt` at the next
    moment from which Lightning can resume exactly, and ends `fit` with `Stopped`, a
    `SystemExit` of status 128 + the signal's number. SIGUSR1 and SIGUSR2 then reach the
    handler that they had before, by which Lightning (under SLURM) or submitit put the
    job into the queue again. The second SIGINT ends the run at once and leaves the last
    checkpoint as it is. Several ranks stop together if any of them got the signal; all
    but the first end with status 0. Validation, test and prediction outside of `fit`
    end after a batch, on each rank that got the signal itself; there is nothing to
    save. A run that ends before such a moment comes, or has taken its last step, counts
    as ended, not as stopped.

    Lightning's own handling of SIGTERM ends a run in states from which it cannot resume
    exactly, and lets ranks communicate inside a signal handler. It is switched off
    while the run is under way. Python delivers signals to the main thread only; a run
    in another thread is left as it is.

    Args:
        dirpath: the folder of `last.ckpt`, for a run without `RunCheckpoint`, whose
            folder comes first; default: the folder of the first `ModelCheckpoint`.
            Without any of these nothing is saved.

    Attributes:
        stopped_by: the signal that ended the run, or None.
        checkpoint_path: the checkpoint from which to resume the stopped run, or None.
        caveat: what differs in the resumed run, or empty.
    """

    late_place = 4

    def __init__(self, dirpath: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self.dirpath = dirpath
        self._forget()

    def _forget(self) -> None:
        self.stopped_by: signal.Signals | None = None
        self.checkpoint_path: str | None = None
        self.caveat = ""
        self._has_saved = False
        self._signals = FirstSignal(
            "stopping after this batch",
            on_ctrl_c="Ctrl+C again stops now, saves nothing",
        )
        self._agreed = 0  # the signal by which all ranks stop
        self._reading: LateReading | None = None

    @property
    def heard(self) -> int:
        """The first signal that came, even if the run then ended by itself; or 0."""
        return self._signals.heard

    # ---- listening -------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._forget()
        put_in_order(trainer)

    def _listen(self, trainer: Any, pl_module: Any) -> None:
        self._signals.listen()

    on_sanity_check_start = on_validation_start = _listen
    on_test_start = on_predict_start = _listen

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        if trainer.received_sigterm and not self.heard:
            self._signals.heard = signal.SIGTERM  # Lightning has heard it before us
        self._signals.listen()
        self._exchange(trainer, wait=True)
        if self._agreed:
            self._stop(trainer)  # nothing has been trained: nothing to save

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

    # ---- while training --------------------------------------------------------------

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._exchange(trainer)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def between_steps(self, trainer: Any, pl_module: Any) -> None:
        if trainer.world_size == 1:
            self._exchange(trainer)  # it may have come in a validation
        # A run that ends by itself needs no checkpoint to resume from.
        if self._agreed and not is_ending(trainer):
            self._save(trainer)
            self._stop(trainer)

    # ---- while evaluating ------------------------------------------------------------

    def _after_batch(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.state.fn == "fit":
            return  # a validation is finished first
        # Here ranks may have different numbers of batches: a rank that asked the others
        # after each batch would wait for those that have no more.
        self._agreed = self.heard
        if self._agreed:
            self._stop(trainer)

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _after_batch

    # ---- stopping --------------------------------------------------------------------

    def on_exception(
        self, trainer: Any, pl_module: Any, exception: BaseException
    ) -> None:
        """Note the signal if Lightning stopped the run; save nothing, because the state
        is torn."""
        if self.stopped_by is None and isinstance(exception, KeyboardInterrupt):
            self._note(trainer, signal.SIGINT)
        elif self.stopped_by is None and isinstance(exception, SIGTERMException):
            self._note(trainer, signal.SIGTERM)

    def _save(self, trainer: Any) -> None:
        path, saver = self._path(trainer), find_callback(trainer, RunCheckpoint)
        if path is None or trainer.fast_dev_run:
            return
        if saver is not None:
            saver.save(trainer)  # nothing, where it has just been saved
        else:
            save_atomically(trainer, path)
        self._has_saved = True
        if why := why_data_differ(trainer):
            self.caveat = f" (with other data than the rest of this epoch: {why})"

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

    def _note(self, trainer: Any, number: int) -> None:
        self.stopped_by = signal.Signals(number)
        if trainer.state.fn != "fit":
            return
        path, saver = self._path(trainer), find_callback(trainer, RunCheckpoint)
        # A file there may be from an earlier run, unless this run was resumed from it.
        is_ours = self._has_saved or saver is not None
        if path is not None and is_ours and path.exists():
            self.checkpoint_path = str(path)
        elif trainer.ckpt_path is not None:
            self.checkpoint_path = str(trainer.ckpt_path)

    def _path(self, trainer: Any) -> Path | None:
        saver = find_callback(trainer, RunCheckpoint)
        if saver is not None:
            return saver.path
        others = [
            getattr(each, "dirpath", None) for each in trainer.checkpoint_callbacks
        ]
        for folder in (self.dirpath, *others):
            if folder is not None:
                return Path(folder, "last.ckpt").absolute()
        return None
