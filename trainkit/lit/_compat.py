"""Everything of Lightning and torch that is not in their public documentation.

Each function has a test of its own, so that a new version which moves one of these
fails there, by name.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch

_LIGHTNING = ("lightning.pytorch.", "pytorch_lightning.")


def scaler_of(trainer: Any) -> Any:
    """The gradient scaler of the Trainer's precision plugin, or None."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def unscales_itself(optimizer: Any) -> bool:
    """Whether a scaler leaves the gradients scaled until inside `optimizer.step()`,
    as it does for fused optimizers."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def is_scaled(scaler: Any, optimizer: Any) -> bool:
    """Whether an optimizer's gradients still carry the scaler's factor."""
    state = scaler._per_optimizer_states.get(id(unwrapped(optimizer)))
    return state is None or state["stage"].name == "READY"


def unwrapped(optimizer: Any) -> Any:
    """The torch optimizer inside a `LightningOptimizer`."""
    return getattr(optimizer, "_optimizer", optimizer)


def averages_models(strategy: Any) -> bool:
    """Whether DDP ranks average weights now and then in place of gradients."""
    return getattr(strategy, "_model_averaging_period", None) is not None


def batches_into_epoch(checkpoint: Any) -> int:
    """How many batches of its epoch a checkpoint's run had done; 0 at its end."""
    loops = checkpoint.get("loops", {})
    progress = loops.get("fit_loop", {}).get("epoch_loop.batch_progress")
    if not progress or progress["is_last_batch"]:
        return 0
    return progress["current"]["processed"]


def num_batches_seen(trainer: Any) -> int:
    """How many batches of this epoch the loader has yielded."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


def logged_step(trainer: Any) -> int:
    """The step under which Lightning's own logs of this batch stand: in manual
    optimization it counts batches, and `global_step` the steps of all optimizers."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def average_of(callback: Any) -> Any:
    """The averaged model that Lightning's `WeightAveraging` keeps, or None."""
    return getattr(callback, "_average_model", None)


def before_batch_transfer(pl_module: Any, batch: Any) -> Any:
    """The module's or the data module's hook of this name, as the loop calls it."""
    return pl_module._on_before_batch_transfer(batch, dataloader_idx=0)


def saves_weights_now(callback: Any, step: int) -> bool:
    """Whether a `ModelCheckpoint` of weights alone is due after an optimizer step."""
    every = getattr(callback, "_every_n_train_steps", 0)
    only = bool(getattr(callback, "save_weights_only", False))
    return only and every >= 1 and step % every == 0


def saves_weights_by_time(callback: Any) -> bool:
    """Whether a `ModelCheckpoint` of weights alone is due by the clock."""
    only = bool(getattr(callback, "save_weights_only", False))
    return only and getattr(callback, "_train_time_interval", None) is not None


def combined_loader(trainer: Any) -> Any:
    """All training loaders, with how they are put together."""
    return trainer.fit_loop._combined_loader


def leaves_places_empty(combined: Any) -> bool:
    """Whether a loader that has ended gives None beside a longer one, or is alone."""
    return len(combined.flattened) == 1 or combined._mode == "max_size"


def forget_iterator(loader: Any) -> Any:
    """A copied `DataLoader` that starts workers of its own, where they persist."""
    loader._iterator = None
    return loader


def follows_validation(trainer: Any) -> bool:
    """Whether Lightning will validate when the batch under way has ended."""
    loop = trainer.fit_loop
    return loop.epoch_loop._should_check_val_fx(loop._data_fetcher)


def logged_at_batch_end(trainer: Any) -> dict[str, int]:
    """How often each metric of `on_train_batch_end` has been logged in this epoch."""
    results = trainer.fit_loop.epoch_loop._results.result_metrics
    return {
        each.meta.forked_name(True): each.update_count
        for each in results
        if each.meta.fx == "on_train_batch_end"
    }


def pending_metrics(trainer: Any) -> tuple[dict[str, Any], int] | None:
    """What Lightning has yet to hand to the loggers at this moment, and the step.

    Checkpoints are saved in `on_train_batch_end` and `on_train_epoch_end`, and the
    metrics of that batch or epoch are logged after these hooks: this is what
    `_LoggerConnector.update_train_step_metrics` and `update_train_epoch_metrics` do.
    """
    loop, connector = trainer.fit_loop, trainer._logger_connector
    if not trainer.training:
        return None
    batches, epochs = loop.epoch_loop.batch_progress, loop.epoch_progress
    step = loop.epoch_loop._batches_that_stepped
    if epochs.current.processed > epochs.current.completed:
        step -= 1
    elif batches.current.processed > batches.current.completed:
        if (
            loop._should_accumulate()
            and trainer.lightning_module.automatic_optimization
        ):
            return None
        if not (connector.should_update_logs or trainer.fast_dev_run):
            return None
    else:
        return None
    metrics = dict(connector.metrics["log"])
    if not metrics:
        return None
    own_step = metrics.pop("step", None)
    if own_step is not None:
        return metrics, int(own_step)
    metrics.setdefault("epoch", trainer.current_epoch)
    return metrics, step


def epoch_sums(trainer: Any) -> dict[str, Any]:
    """What `self.log(..., on_epoch=True)` has added up in this epoch, by its key."""
    results = trainer.fit_loop.epoch_loop._results
    return {
        key: each
        for key, each in results.items()
        if each.meta.on_epoch and not each.has_reset
    }


def sum_state(result: Any) -> dict[str, Any] | None:
    """One of `epoch_sums` as tensors; None where a metric object keeps it."""
    if not result.is_tensor:
        return None
    state = {"value": result.value.detach().cpu().clone()}
    if result.meta.is_mean_reduction:
        state["weight"] = result.cumulated_batch_size.detach().cpu().clone()
    return state


def add_sum_state(result: Any, state: dict[str, Any]) -> None:
    """Take into one of `epoch_sums` what was added up before."""
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


def restore_callback_metrics(trainer: Any, metrics: dict[str, Any]) -> None:
    """Let `trainer.callback_metrics` know what was logged before a resume."""
    trainer._logger_connector._callback_metrics.update(metrics)


def restore_loaders(trainer: Any) -> None:
    """Resume the loaders where the checkpoint was, if Lightning has not.

    If `configure_optimizers` asks for `estimated_stepping_batches`, the loaders are set
    up before Lightning knows their states. It then leaves the states unused, and the
    epoch would begin at its first row. Call this in `on_train_start`, before random
    states are restored: a new iterator may draw.
    """
    loop = trainer.fit_loop
    if loop.restarting and loop._combined_loader_states_to_load:
        loop._load_combined_loader_states()
        iter(loop._data_fetcher)


def is_within_epoch(trainer: Any) -> bool:
    """Whether a run resumes within an epoch; call it in `on_train_start`."""
    return bool(trainer.fit_loop.restarted_mid_epoch)


def reads_ahead(trainer: Any) -> bool:
    """Whether Lightning has a batch read before it asks for it: of loaders without a
    length, to know which batch is the last. Their state is then ahead as well."""
    return trainer.fit_loop._data_fetcher.length is None


def is_ending(trainer: Any) -> bool:
    """Whether this batch is the last that is trained on: the steps are taken, or at an
    epoch's end the epochs, or `trainer.should_stop` ends it, which it does not while
    `min_steps` or `min_epochs` is not reached."""
    loop = trainer.fit_loop
    if 0 <= trainer.max_steps <= trainer.global_step:
        return True
    if 0 <= (loop.max_epochs or -1) <= loop.epoch_progress.current.processed:
        return True
    return bool(trainer.should_stop and loop._can_stop_early)


def end_validation(trainer: Any) -> None:
    """Put the module's parts back in the modes in which they train, as Lightning does
    after a validation."""
    trainer.fit_loop.epoch_loop.val_loop._on_evaluation_model_train()


def end_restart(trainer: Any) -> None:
    """Lightning takes a resumed epoch for one that restarts until it ends, and then
    leaves out the schedulers that go by a metric (`_FitLoop.on_advance_end`)."""
    trainer.fit_loop._restarting = False


def leave_ended_epoch(trainer: Any) -> bool:
    """Begin the next epoch if the checkpoint was written after one had ended.

    With `max_epochs=-1` Lightning would begin the next with the batch index at which
    the last one ended, and end it too late. To be called in `on_train_start`.

    Returns:
        Whether that epoch ended before its last batch.
    """
    loop, epochs = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.total
    has_ended = loop.restarting and epochs.ready == epochs.completed > 0
    if has_ended and loop.batch_progress.is_last_batch:
        loop.restarting = False
    return has_ended and not loop.batch_progress.is_last_batch


def steps_by_metric(trainer: Any) -> bool:
    """Whether a scheduler that goes by a metric moves after this batch's hooks."""
    by_step = any(
        config.reduce_on_plateau and config.interval == "step"
        for config in trainer.lr_scheduler_configs
    )
    return by_step and not trainer.fit_loop._should_accumulate()


def leaves_fit(trainer: Any) -> BaseException:
    """What a callback raises to leave `trainer.fit` before training, as Lightning's own
    finders do: loops, loaders and signals are torn down, and `fit` returns."""
    package = type(trainer.fit_loop).__module__.partition(".loops.")[0]
    module = importlib.import_module(f"{package}.utilities.exceptions")
    return module._TunerExitException()


def parts_of(trainer: Any) -> list[Any]:
    """The Trainer and what it counts, logs and is doing, each with attributes of its
    own: loops with their progress, results, states."""
    names = (".loops.", ".logger_connector.", ".trainer.states")
    found, waiting = [trainer], [trainer]
    while waiting:
        for value in list(vars(waiting.pop()).values()):
            concerned = any(name in type(value).__module__ for name in names)
            known = any(value is each for each in found)
            if not concerned or known or isinstance(value, Enum):
                continue
            if hasattr(value, "__dict__"):
                found.append(value)
                waiting.append(value)
    return found


def starts_processes_for_fit(strategy: Any) -> bool:
    """Whether `fit` runs in processes that end with it, as under `ddp_spawn`."""
    return getattr(strategy, "_start_method", "popen") not in (None, "popen")


def write_batch_size(loader: Any, size: int) -> None:
    """Give a `DataLoader` another batch size: it refuses that once it is made, though
    Lightning makes it anew from its attributes, and a `BatchSampler` takes it."""
    if loader.batch_size is not None:
        object.__setattr__(loader, "batch_size", size)
    loader.batch_sampler.batch_size = size


def current_hook(pl_module: Any) -> str:
    """The hook in which the module is logging."""
    return pl_module._current_fx_name or ""


@contextmanager
def as_hook(pl_module: Any, hook: str) -> Iterator[None]:
    """Let the module log as from a hook that has ended by now."""
    before = pl_module._current_fx_name
    pl_module._current_fx_name = hook
    try:
        yield
    finally:
        pl_module._current_fx_name = before


def set_batch_value(metric: Any, value: Any) -> None:
    """What a metric object shows for the step, as after its `forward`; nothing where
    that has left nothing, as the one of some wrappers does."""
    if metric._forward_cache is not None:
        metric._forward_cache = value


def forget_computed(metric: Any) -> None:
    """Let a metric object compute anew, from the same state."""
    metric._computed = None


def skips_backward(trainer: Any) -> bool:
    """Whether the epoch runs forward only, as that of `StochasticWeightAveraging` for
    BatchNorm's statistics does."""
    return trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward


def uncompiled(pl_module: Any, function: Any) -> Any:
    """A function that a compiled `training_step` calls as it is, without tracing it."""
    if getattr(pl_module, "_compiler_ctx", None) is None:
        return function
    return torch.compiler.disable(function)


@contextmanager
def replaced(owner: Any, **methods: Any) -> Iterator[None]:
    """Let an object have other methods for a while."""
    own = vars(owner)
    before = {name: own[name] for name in methods if name in own}
    own.update(methods)
    try:
        yield
    finally:
        for name in methods:
            own.pop(name, None)
        own.update(before)


def has_plain_backward(trainer: Any) -> bool:
    """Whether Lightning's strategy object and precision plugin do nothing around a
    backward pass but call hooks, a gradient scaler left aside."""
    strategy, plugin = trainer.strategy, trainer.precision_plugin
    own = ("pre_backward", "post_backward", "backward")
    kinds = [getattr(type(each), name) for each in (strategy, plugin) for name in own]
    plain = ("Strategy.", "DDPStrategy.", "Precision.", "MixedPrecision.")
    return all(
        kind.__qualname__.startswith(plain) and kind.__module__.startswith(_LIGHTNING)
        for kind in kinds
    )


def is_listened_to(
    hooks: Sequence[str], trainer: Any, pl_module: Any, *, apart_from: Any
) -> bool:
    """Whether the module or a callback has one of these hooks."""
    owners = [each for each in trainer.callbacks if each is not apart_from]
    return any(has_own(owner, hook) for owner in (pl_module, *owners) for hook in hooks)


def transfers_plainly(trainer: Any, pl_module: Any) -> bool:
    """Whether batches reach the device without a hook of the user's."""
    hooks = ("transfer_batch_to_device", "on_after_batch_transfer")
    owners = [pl_module, *filter(None, [trainer.datamodule])]
    is_own = type(trainer.strategy).batch_to_device.__module__.startswith(_LIGHTNING)
    return is_own and not any(has_own(o, hook) for o in owners for hook in hooks)


def has_own(owner: Any, hook: str) -> bool:
    """Whether a module, data module or callback has a hook that Lightning did not
    write."""
    if hook in vars(owner):
        return True
    return not getattr(type(owner), hook).__module__.startswith(_LIGHTNING)
