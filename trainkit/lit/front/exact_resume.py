"""The one callback that a run needs to be interrupted and resumed exactly."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from lightning.pytorch import Callback

from trainkit.errors import TrainkitError
from trainkit.lit.callback.base import find_callback, has_callback, windows_of
from trainkit.lit.logs.metrics_csv import MetricRows
from trainkit.lit.resume.graceful_stop import GracefulStop
from trainkit.lit.resume.mid_epoch import (
    begin_batch,
    resume,
    why_data_differ,
)
from trainkit.lit.resume.per_rank import EpochSums, RandomState
from trainkit.lit.resume.run_checkpoint import RunCheckpoint

_PARTS = (EpochSums, MetricRows, RandomState, GracefulStop)
"""What `ExactResume` brings beside the checkpoint that it writes itself."""


class ExactResume(RunCheckpoint):
    """Makes an interrupted run end exactly as it would have ended uninterrupted.

        trainer = Trainer(
            callbacks=[ExactResume(dirpath="runs/first")],
            logger=MetricsCSVLogger("runs/first"),
        )
        trainer.fit(module, ResumableLoader(rows, 32), ckpt_path="last")

    It writes `last.ckpt` as `RunCheckpoint` does, and adds four callbacks to the
    Trainer: `RandomState`, `EpochSums`, `MetricRows` and `GracefulStop`. Their entries
    in a checkpoint are the ones that the five callbacks write by themselves, so either
    way resumes what the other has saved.

    Before training it warns by name of what would make a resumed run differ: a loader
    that cannot be resumed, a `CSVLogger`, a folder that the next start will not find.
    It cannot see worker processes that draw random numbers, which begin anew: seed them
    by the row's index. Python delivers signals to the main thread only, so `fit` must
    run there to be saved by them. It refuses duplicates: one of the five callbacks
    beside it, or another `ModelCheckpoint` that writes `last.ckpt` to its folder.

    Args:
        dirpath: the folder of `last.ckpt`; default: `checkpoints` in the folder of the
            first logger.
        every_n_train_steps: how many optimizer steps lie between two checkpoints.

    Attributes:
        stop: the `GracefulStop`, which knows by what signal the run was stopped.
    """

    def __init__(
        self,
        *,
        dirpath: str | os.PathLike[str] | None = None,
        every_n_train_steps: int = 50,
    ) -> None:
        super().__init__(dirpath, every_n_train_steps=every_n_train_steps)
        self.stop = GracefulStop()
        self._brought: list[Any] = [
            *(kind() for kind in _PARTS if kind is not GracefulStop),
            self.stop,
        ]
        for each in self._brought:
            each.brought_by = self
        self._has_own_place = dirpath is not None

    @property
    def state_key(self) -> str:
        """The name of its state in a checkpoint, which is a `RunCheckpoint`'s name."""
        own, shared = type(self).__qualname__, RunCheckpoint.__qualname__
        return super().state_key.replace(own, shared, 1)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        known = _without_leftovers(trainer.callbacks)
        _refuse_second(known, self)
        new = [each for each in self._brought if not _stands_in(known, each)]
        # A new list: Lightning is walking through the old one to call `setup`.
        trainer.callbacks = [*known, *new]
        for each in new:
            each.setup(trainer, pl_module, stage)
        super().setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        _refuse_same_file(trainer, self)
        if trainer.is_global_zero and not trainer.fast_dev_run:
            for text in self._missing_places(trainer):
                warnings.warn(f"ExactResume: {text}", stacklevel=2)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        has_windows = windows_of(trainer) is not None
        if not has_windows:  # whose callback says it otherwise
            resume(trainer, pl_module)
        if trainer.is_global_zero and not trainer.fast_dev_run:
            if why := why_data_differ(trainer):
                warnings.warn(
                    f"ExactResume: {why}. A run that resumes within an epoch reads "
                    f"other rows then.",
                    stacklevel=2,
                )
            if not has_windows and _accumulates(trainer):
                warnings.warn(
                    "ExactResume: Lightning's checkpoints leave out the gradients that "
                    "a window has summed up so far, so a run that is resumed inside a "
                    "window differs. Add AccumulationCallback, or AccumulationMixin to "
                    "the module, or set accumulate_grad_batches=1.",
                    stacklevel=2,
                )
        super().on_train_start(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if windows_of(trainer) is None:
            begin_batch(trainer, pl_module)
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def _missing_places(self, trainer: Any) -> Iterator[str]:
        loggers = trainer.loggers
        if not self._has_own_place and loggers and isinstance(loggers[0].version, int):
            yield (
                f"last.ckpt stands in {self.dirpath}, and {type(loggers[0]).__name__} "
                f"numbers a new folder at each start, in which ckpt_path='last' finds "
                f"nothing. Pass ExactResume(dirpath=...), or give the logger a version."
            )
        if trainer.ckpt_path is None and self.path.exists():
            yield (
                f"the run begins anew, and will replace {self.path}, which an earlier "
                f"run has left. Pass ckpt_path={str(self.path)!r} to fit in order to "
                f"resume that run, or another dirpath to keep it."
            )
        for logger in loggers:
            if has_callback([logger], "CSVLogger"):
                yield (
                    "a CSVLogger begins its file anew when a run is resumed, so the "
                    "earlier rows are lost. Use trainkit.MetricsCSVLogger."
                )


def without_checkpoint(
    callbacks: Sequence[Callback], dirpath: str | os.PathLike[str] | None = None
) -> list[Callback]:
    """The parts of `ExactResume` for a run whose checkpoints the user chooses.

    Args:
        callbacks: the run's callbacks. A part that is among them is not made again;
        with an `ExactResume` nothing is missing.
        dirpath: of the `GracefulStop`.
    """
    if any(isinstance(each, ExactResume) for each in callbacks):
        return []
    missing = [
        kind for kind in _PARTS if not any(isinstance(each, kind) for each in callbacks)
    ]
    return [
        GracefulStop(dirpath) if kind is GracefulStop else kind() for kind in missing
    ]


def find_stop(trainer: Any) -> GracefulStop:
    """The `GracefulStop` of a run, alone or as part of an `ExactResume`."""
    whole = find_callback(trainer, ExactResume)
    stop = find_callback(trainer, GracefulStop) if whole is None else whole.stop
    assert stop is not None
    return stop


def _stands_in(callbacks: Sequence[Callback], own: Any) -> bool:
    return any(each is own for each in callbacks)


def _without_leftovers(callbacks: Sequence[Callback]) -> list[Callback]:
    """All callbacks except those brought by an `ExactResume` that was replaced.

    Lightning replaces it if a module's `configure_callbacks` returns another one.
    """
    owners = ((each, getattr(each, "brought_by", None)) for each in callbacks)
    return [
        each for each, owner in owners if owner is None or _stands_in(callbacks, owner)
    ]


def _refuse_second(callbacks: Sequence[Callback], own: ExactResume) -> None:
    for each in callbacks:
        is_ours = each is own or getattr(each, "brought_by", None) is own
        if not is_ours and isinstance(each, (RunCheckpoint, *_PARTS)):
            name = type(each).__name__
            raise TrainkitError(
                f"ExactResume: it does all that RunCheckpoint, RandomState, EpochSums, "
                f"MetricRows and GracefulStop do, and must stand alone, received "
                f"another {name} beside it. Take one of the two out of the callbacks."
            )


def _refuse_same_file(trainer: Any, own: ExactResume) -> None:
    for each in trainer.checkpoint_callbacks:
        folder = getattr(each, "dirpath", None)
        if each is own or folder is None or not _writes_last(each, own):
            continue
        if os.path.realpath(folder) == os.path.realpath(str(own.dirpath)):
            raise TrainkitError(
                f"ExactResume: only one callback may write {own.path}, and "
                f"{type(each).__name__} writes it too. Leave save_last out there, or "
                f"give one of the two another dirpath."
            )


def _writes_last(saver: Any, own: ExactResume) -> bool:
    name = getattr(saver, "CHECKPOINT_NAME_LAST", None)
    keeps_last = bool(getattr(saver, "save_last", False)) and name == own.path.stem
    return keeps_last or getattr(saver, "filename", None) == own.path.stem


def _accumulates(trainer: Any) -> bool:
    is_scheduled = has_callback(trainer.callbacks, "GradientAccumulationScheduler")
    return is_scheduled or trainer.accumulate_grad_batches > 1
