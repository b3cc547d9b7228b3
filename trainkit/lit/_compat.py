"""Everything of Lightning and torch that is not in their public documentation.

Each function has a test of its own, so that a new version which moves one of these
fails there, by name.
"""

from __future__ import annotations

from typing import Any


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


def forget_iterator(loader: Any) -> Any:
    """A copied `DataLoader` that starts workers of its own, where they persist."""
    loader._iterator = None
    return loader
