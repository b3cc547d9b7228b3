"""Resuming within an epoch, and what Lightning leaves out there."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from lightning.fabric.utilities.data import sized_len
from torch.utils._pytree import tree_leaves

from trainkit.data.streams import ResumableStream, is_litdata
from trainkit.lit._compat import has_own
from trainkit.lit.callback.base import has_callback, has_schedule, windows_of
from trainkit.lit.resume._compat import (
    count_batches,
    end_restart,
    leave_ended_epoch,
    restore_loaders,
)


def resume(trainer: Any, pl_module: Any) -> None:
    """Prepare a resumed run, in `on_train_start`; a new run is left as it is."""
    restore_loaders(trainer)
    if leave_ended_epoch(trainer) and trainer.is_global_zero:
        warnings.warn(
            "checkpoint: it was written after its training had ended inside an epoch, "
            "at max_steps for instance. Lightning takes that epoch for finished and "
            "begins the next: what the loader had left is not read. Resume from a "
            "checkpoint that a callback wrote during training, such as "
            "ExactResume's last.ckpt.",
            stacklevel=2,
        )
    loaders = tree_leaves(trainer.train_dataloader)
    read = (getattr(each, "batches_read", None) for each in loaders)
    number = next((each for each in read if each is not None), None)
    if trainer.fit_loop.restarted_mid_epoch and number is not None:
        count_batches(trainer, number)
    if trainer.fit_loop.restarted_mid_epoch and trainer.is_global_zero:
        _announce_missed_hooks(trainer, pl_module)
        why = why_data_differ(trainer)
        # Of a loader with a length and without a state, Lightning says it.
        is_over = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        is_ahead = _reads_ahead(trainer) and not is_over
        if why and (is_ahead or any(map(is_litdata, loaders))):
            warnings.warn(
                f"checkpoint: it was taken within an epoch, and {why}.", stacklevel=2
            )


def begin_batch(trainer: Any, pl_module: Any) -> None:
    """To be called in `on_train_batch_start`; does something in a resumed run's first,
    when every callback's `on_train_start` is over."""
    if not trainer.fit_loop.restarting:
        return
    if trainer.fit_loop.restarted_mid_epoch:
        for callback in trainer.callbacks:
            # Otherwise the rest of the epoch would have windows of one micro-batch.
            if has_callback([callback], "GradientAccumulationScheduler"):
                callback.on_train_epoch_start(trainer, pl_module)
    end_restart(trainer)


def _announce_missed_hooks(trainer: Any, pl_module: Any) -> None:
    hook, name = "on_train_epoch_start", "StochasticWeightAveraging"
    missed = [
        each
        for each in (*trainer.callbacks, pl_module)
        if has_callback([each], name)
        or has_own(each, hook)
        and not type(each).__module__.startswith("trainkit.")
    ]
    if missed:
        names = " and ".join(type(each).__name__ for each in missed)
        warnings.warn(
            f"checkpoint: it was taken within epoch {trainer.current_epoch}, and "
            f"Lightning skips on_train_epoch_start when it resumes in mid-epoch, so "
            f"what {names} sets there is missing until the next epoch. Save it with "
            f"the checkpoint, or set it in on_train_start as well.",
            stacklevel=2,
        )


def why_data_differ(trainer: Any) -> str:
    """Why a run resumed within an epoch reads other rows than were left; empty if the
    rows are exact."""
    loaders = tree_leaves(trainer.train_dataloader)  # lists and dicts may hold them
    if not all(hasattr(each, "load_state_dict") for each in loaders):
        return (
            "the train_dataloader starts again at its first batch, since it has no "
            "load_state_dict; ResumableLoader has, and for a stream "
            "ResumableStream(loader) around torchdata's StatefulDataLoader"
        )
    if any(map(is_litdata, loaders)):
        return (
            "litData's loader repeats the rest of this epoch in later ones, since "
            "Lightning lets no pass end; wrap it: ResumableStream(loader)"
        )
    if _reads_ahead(trainer):
        return (
            "the train_dataloader leaves a batch out, since it has no length, and "
            "Lightning reads such a one a batch ahead; wrap it: ResumableStream(loader)"
        )
    return ""


def missing_state(trainer: Any) -> Iterator[str]:
    """What a checkpoint will not hold; known once training has begun."""
    if why := why_data_differ(trainer):
        yield f"{why}. A run that resumes within an epoch reads other rows then."
    accumulates = trainer.accumulate_grad_batches > 1 or has_schedule(trainer)
    if accumulates and windows_of(trainer) is None:
        yield (
            "Lightning's checkpoints leave out the gradients that a window has summed "
            "up so far, so a run that is resumed inside a window differs. Add "
            "AccumulationCallback, or AccumulationMixin to the module, or set "
            "accumulate_grad_batches=1."
        )


def _reads_ahead(trainer: Any) -> bool:
    """Whether Lightning reads one batch ahead, as it does if a loader has no length,
    and one of them saves the place of that batch."""
    loaders = tree_leaves(trainer.train_dataloader)
    is_ahead = any(sized_len(each) is None for each in loaders)
    return is_ahead and not all(isinstance(each, ResumableStream) for each in loaders)
