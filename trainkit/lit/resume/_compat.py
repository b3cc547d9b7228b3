"""What resuming uses of Lightning beside its public documentation."""

from __future__ import annotations

from typing import Any

from torch.utils._pytree import tree_leaves

from trainkit.data.streams import ResumableStream


def batches_into_epoch(checkpoint: Any) -> int:
    """How many batches of its epoch a run had done at a checkpoint; 0 at the end."""
    loops = checkpoint.get("loops", {})
    progress = loops.get("fit_loop", {}).get("epoch_loop.batch_progress")
    if not progress or progress["is_last_batch"]:
        return 0
    return progress["current"]["processed"]


def count_batches(trainer: Any, number: int) -> None:
    """Let a resumed epoch have had so many batches, which decides where windows end."""
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    # One less is completed if the checkpoint was written in `on_train_batch_end`.
    progress.completed += number - progress.processed
    progress.ready = progress.started = progress.processed = number


def epoch_sums(trainer: Any) -> dict[str, Any]:
    """The sums of `self.log(..., on_epoch=True)` in this epoch, by their keys."""
    results = trainer.fit_loop.epoch_loop._results
    return {
        key: each
        for key, each in results.items()
        if each.meta.on_epoch and not each.has_reset
    }


def sum_state(result: Any) -> dict[str, Any] | None:
    """One of `epoch_sums` as tensors; None if a metric object holds it."""
    if not result.is_tensor:
        return None
    state = {"value": result.value.detach().cpu().clone()}
    if result.meta.is_mean_reduction:
        state["weight"] = result.cumulated_batch_size.detach().cpu().clone()
    return state


def add_sum_state(result: Any, state: dict[str, Any]) -> None:
    """Add a saved `sum_state` to one of `epoch_sums`."""
    before = state["value"].to(result.value)
    meta = result.meta
    if meta.is_max_reduction or meta.is_min_reduction:
        result.value = meta.reduce_fx(before, result.value)
    else:
        result.value = before + result.value
    if meta.is_mean_reduction:
        weight = state["weight"].to(result.cumulated_batch_size)
        result.cumulated_batch_size = weight + result.cumulated_batch_size
    result._computed = None


def restore_loaders(trainer: Any) -> None:
    """Resume the loaders at the checkpoint's place, if Lightning has not done so, and
    tell streams what Lightning has read ahead.

    If `configure_optimizers` uses `estimated_stepping_batches`, the loaders are set up
    before Lightning knows their states. It then does not use the states, and the epoch
    would begin at its first row. Call this in `on_train_start`, before random states
    are restored: a new iterator may draw random numbers.
    """
    loop = trainer.fit_loop
    if loop.restarting and loop._combined_loader_states_to_load:
        loop._load_combined_loader_states()
        iter(loop._data_fetcher)
    loaders = loop._combined_loader.flattened
    streams = [each for each in loaders if isinstance(each, ResumableStream)]
    # Lightning has begun to read before it tells the epoch.
    if any([each.begin_epoch(trainer.current_epoch) for each in streams]):
        iter(loop._data_fetcher)
    tell_streams(trainer)


def tell_streams(trainer: Any) -> None:
    """Let each `ResumableStream` know which batches wait to be trained on.

    Lightning reads one batch ahead if a loader has no length. The loaders may be others
    in each epoch, and this is to be called before the first batch of each.
    """
    loop = trainer.fit_loop

    def is_waiting(batch: Any) -> bool:
        ahead = getattr(loop._data_fetcher, "batches", ())
        leaves = tree_leaves(list(ahead), is_leaf=lambda each: each is batch)
        return any(each is batch for each in leaves)

    for loader in loop._combined_loader.flattened:
        if isinstance(loader, ResumableStream):
            loader.is_waiting = is_waiting
            loader.is_alone = lambda: trainer.interrupted


def ends_epoch(trainer: Any) -> bool:
    """Whether the batch under way is the last one of its epoch."""
    num_batches = trainer.num_training_batches
    return trainer.is_last_batch or trainer.fit_loop.batch_idx + 1 == num_batches


def is_ending(trainer: Any) -> bool:
    """Whether training ends after this batch.

    It ends at `max_steps`, with the last epoch, or by `trainer.should_stop` once
    `min_steps` and `min_epochs` are reached.
    """
    loop = trainer.fit_loop
    if 0 <= trainer.max_steps <= trainer.global_step:
        return True
    if 0 <= (loop.max_epochs or -1) <= loop.epoch_progress.current.processed:
        return True
    return bool(trainer.should_stop and loop._can_stop_early)


def end_restart(trainer: Any) -> None:
    """Let a resumed epoch not count as a restart, whose end skips some schedulers."""
    trainer.fit_loop._restarting = False


def leave_ended_epoch(trainer: Any) -> bool:
    """Begin the next epoch if the checkpoint was written after an epoch had ended, in
    its `on_train_epoch_end` or the next one's `on_train_epoch_start` too.

    Lightning would begin the next one with the batch index at which the last one ended,
    and end it too late or at once; or, without `max_epochs`, end the last one again.
    Call this in `on_train_start`.

    Returns:
        Whether the epoch ended before its last batch.
    """
    fit_loop, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    if fit_loop.restarted_on_epoch_end:
        fit_loop.epoch_progress.increment_completed()
        fit_loop.reset_restart_stage()
    epochs = fit_loop.epoch_progress.total
    has_ended = loop.restarting and epochs.started == epochs.completed > 0
    if has_ended and loop.batch_progress.is_last_batch:
        loop.restarting = False
        # The last batch's step, which loggers count, was to be added in a restart.
        loop._batches_that_stepped += loop.restarted_on_train_batch_end
    return has_ended and not loop.batch_progress.is_last_batch
