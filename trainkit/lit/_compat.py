"""What trainkit uses of Lightning beside its public documentation.

What only resuming uses stands in `resume/_compat.py`.
Each function runs in a test, its own or its caller's, so that a version of Lightning
that changes one of these things fails there.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

_LIGHTNING = ("lightning.pytorch.", "pytorch_lightning.")
_OURS = "trainkit."
_OF_TRAINER = tuple(p + part for p in _LIGHTNING for part in ("loops.", "trainer."))


def scaler_of(trainer: Any) -> Any:
    """The gradient scaler of the Trainer's precision plugin, or None."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def unscales_itself(optimizer: Any) -> bool:
    """Whether a scaler leaves gradients scaled until the step of a fused optimizer."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def is_scaled(scaler: Any, optimizer: Any) -> bool:
    """Whether an optimizer's gradients are still multiplied by the scaler's factor."""
    state = scaler._per_optimizer_states.get(id(unwrapped(optimizer)))
    return state is None or state["stage"].name == "READY"


def unwrapped(optimizer: Any) -> Any:
    """The torch optimizer inside a `LightningOptimizer`."""
    return getattr(optimizer, "_optimizer", optimizer)


def num_batches_seen(trainer: Any) -> int:
    """How many batches the loader has yielded in this epoch."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


def logged_step(trainer: Any) -> int:
    """The step with which Lightning logs this batch: not always `global_step`.

    Manual optimization logs by batches, and `global_step` adds up all optimizers.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def average_of(callback: Any) -> Any:
    """The averaged model that Lightning's `WeightAveraging` keeps, or None."""
    return getattr(callback, "_average_model", None)


def before_batch_transfer(pl_module: Any, batch: Any) -> Any:
    """A batch after `on_before_batch_transfer` of the module or the data module."""
    return pl_module._on_before_batch_transfer(batch, dataloader_idx=0)


def combined_loader(trainer: Any) -> Any:
    """The object that combines all training loaders."""
    return trainer.fit_loop._combined_loader


def forget_iterator(loader: Any) -> Any:
    """Let a copied `DataLoader` not use the persistent workers of the original."""
    loader._iterator = None
    return loader


def follows_validation(trainer: Any) -> bool:
    """Whether Lightning will validate after the present batch."""
    loop = trainer.fit_loop
    return loop.epoch_loop._should_check_val_fx(loop._data_fetcher)


def shown_now(trainer: Any) -> dict[str, float]:
    """The values for bars of the batch or validation that ended."""
    return trainer._logger_connector.metrics["pbar"]


def logged_at_batch_end(trainer: Any) -> dict[str, int]:
    """How often each metric was logged in `on_train_batch_end` in this epoch."""
    results = trainer.fit_loop.epoch_loop._results.result_metrics
    return {
        each.meta.forked_name(True): each.update_count
        for each in results
        if each.meta.fx == "on_train_batch_end"
    }


def pending_metrics(trainer: Any) -> tuple[dict[str, Any], int] | None:
    """The metrics that Lightning will pass to the loggers next, and their step.

    Checkpoints are saved in `on_train_batch_end` and `on_train_epoch_end`. The metrics
    of that batch or epoch are logged after these hooks, in
    `_LoggerConnector.update_train_step_metrics` and `update_train_epoch_metrics`.
    """
    loop, connector = trainer.fit_loop, trainer._logger_connector
    if not trainer.training:
        return None
    batches, epochs = loop.epoch_loop.batch_progress, loop.epoch_progress
    step = loop.epoch_loop._batches_that_stepped
    if epochs.current.processed > epochs.current.completed:
        step -= 1
    elif batches.current.processed > batches.current.completed:
        is_automatic = trainer.lightning_module.automatic_optimization
        if is_automatic and loop._should_accumulate():
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


def add_callback_metrics(trainer: Any, metrics: dict[str, Any]) -> None:
    """Add to `trainer.callback_metrics`; to read it may wait for a device."""
    trainer._logger_connector._callback_metrics.update(metrics)


def end_validation(trainer: Any) -> None:
    """Set the modes of training again, as Lightning does after a validation."""
    trainer.fit_loop.epoch_loop.val_loop._on_evaluation_model_train()


def steps_by_metric(trainer: Any) -> bool:
    """Whether a scheduler that depends on a metric steps after this batch's hooks."""
    by_step = any(
        config.reduce_on_plateau and config.interval == "step"
        for config in trainer.lr_scheduler_configs
    )
    return by_step and not trainer.fit_loop._should_accumulate()


def leaves_fit(trainer: Any) -> BaseException:
    """The exception with which a callback lets `trainer.fit` tear down and return."""
    package = type(trainer.fit_loop).__module__.partition(".loops.")[0]
    module = importlib.import_module(f"{package}.utilities.exceptions")
    return module._TunerExitException()


def quiet_trainer(live: Any, **options: Any) -> Any:
    """A Trainer beside one that trains: on its device alone, silent, without saving.

    It has no callbacks but those that it is given, also where installed packages add
    theirs to each Trainer.

    Args:
        live: the Trainer that trains.
        **options: of the new one.
    """
    package = type(live.fit_loop).__module__.partition(".loops.")[0]
    of = importlib.import_module
    fabric = "lightning.fabric" if "." in package else "lightning_fabric"
    environments = of(f"{fabric}.plugins.environments")
    device, trainer_class = live.strategy.root_device, of(package).Trainer
    strategy = of(f"{package}.strategies").SingleDeviceStrategy(device=device)
    strategy.global_rank, strategy.local_rank = live.global_rank, live.local_rank

    class Quiet(trainer_class):
        is_rehearsal = True
        estimated_stepping_batches = property(
            lambda self: live.estimated_stepping_batches
        )

    is_gpu = device.type == "cuda"
    connector = of(f"{package}.trainer.connectors.callback_connector")
    with replaced(connector, _load_external_callbacks=lambda group: []):
        trainer = Quiet(
            accelerator="gpu" if is_gpu else device.type,
            devices=[device.index or 0] if is_gpu else 1,
            strategy=strategy,
            plugins=[environments.LightningEnvironment()],
            logger=of(f"{package}.loggers.logger").DummyLogger(),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            max_epochs=live.max_epochs,
            max_steps=live.max_steps,
            default_root_dir=live.default_root_dir,
            **options,
        )
    signals = trainer._signal_connector
    signals.register_signal_handlers = signals.teardown = lambda: None
    trainer._data_connector.prepare_data = lambda: None  # it waits for all ranks
    return trainer


def stand_where(trainer: Any, live: Any) -> None:
    """Let a Trainer begin at the epoch and the step of another."""
    loop, epoch, step = trainer.fit_loop, live.current_epoch, live.global_step
    progress = loop.epoch_progress.current
    progress.ready = progress.started = progress.processed = epoch
    progress.completed = epoch
    loops = loop.epoch_loop
    loops.automatic_optimization.optim_progress.optimizer.step.total.completed = step
    loops.manual_optimization.optim_step_progress.total.completed = step


def copied_trainer(live: Any) -> Any:
    """A Trainer like another, which stays as it is: Lightning's own parts are copied,
    and the precision plugin; what else they hold is shared, and so are the processes
    of other ranks. What was logged, which may hold the user's metrics, is not there."""
    strategy = copy.copy(live.strategy)
    strategy.precision_plugin = copy.deepcopy(live.precision_plugin)
    memo: dict[int, Any] = {id(live.strategy): strategy}
    seen, waiting = {id(live)}, [live]
    while waiting:
        for value in vars(waiting.pop()).values():
            kinds = [each.__module__ for each in type(value).__mro__]
            if type(value).__name__ == "_ResultCollection":
                memo[id(value)] = type(value)(training=value.training)
            elif any(kind.startswith(_OF_TRAINER) for kind in kinds):
                waiting += [] if id(value) in seen else [value]
                seen.add(id(value))
            else:
                memo.setdefault(id(value), value)
    return copy.deepcopy(live, memo)


def starts_processes_for_fit(strategy: Any) -> bool:
    """Whether `fit` runs in processes that end with it, as with `ddp_spawn`."""
    return getattr(strategy, "_start_method", "popen") not in (None, "popen")


def write_batch_size(loader: Any, size: int) -> None:
    """Give an existing `DataLoader` another batch size; it refuses an assignment."""
    if loader.batch_size is not None:
        object.__setattr__(loader, "batch_size", size)
    loader.batch_sampler.batch_size = size


def step_arguments(pl_module: Any, batch: Any, batch_idx: int) -> tuple[Any, ...]:
    """The arguments with which Lightning calls the module's `training_step`."""
    step = pl_module.training_step
    takes_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)
    return (batch, batch_idx) if takes_index else (batch,)


def current_hook(pl_module: Any) -> str:
    """The hook of the module that runs now."""
    return pl_module._current_fx_name or ""


@contextmanager
def as_hook(pl_module: Any, hook: str) -> Iterator[None]:
    """Let the module log as if another hook were running."""
    before = pl_module._current_fx_name
    pl_module._current_fx_name = hook
    try:
        yield
    finally:
        pl_module._current_fx_name = before


def forget_computed(metric: Any) -> None:
    """Let a metric object compute its value again from its state."""
    metric._computed = None


def skips_backward(trainer: Any) -> bool:
    """Whether the epoch only computes BatchNorm's statistics, without backward."""
    return trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward


def uncompiled(pl_module: Any, function: Any) -> Any:
    """A function that a compiled `training_step` does not trace."""
    is_plain = getattr(pl_module, "_compiler_ctx", None) is None
    return function if is_plain else torch.compiler.disable(function)


@contextmanager
def replaced(owner: Any, **methods: Any) -> Iterator[None]:
    """Replace methods of an object, within a `with` block."""
    own = vars(owner)
    before = {name: own[name] for name in methods if name in own}
    own.update(methods)
    try:
        yield
    finally:
        for name in methods:
            own.pop(name, None)
        own.update(before)


def transfers_plainly(trainer: Any, pl_module: Any) -> bool:
    """Whether no hook of the user changes batches on their way to the device."""
    hooks = ("transfer_batch_to_device", "on_after_batch_transfer")
    owners = [pl_module, *filter(None, [trainer.datamodule])]
    is_own = type(trainer.strategy).batch_to_device.__module__.startswith(_LIGHTNING)
    return is_own and not any(has_own(o, hook) for o in owners for hook in hooks)


def hands_on_arguments(trainer: Any, pl_module: Any) -> bool:
    """Whether `strategy.backward` hands its arguments on to `loss.backward`, and
    nothing of the user's sees the loss before: no `backward` on the way, and no hook.
    """
    strategy, plugin = trainer.strategy, trainer.strategy.precision_plugin
    theirs = [c for c in trainer.callbacks if not type(c).__module__.startswith(_OURS)]
    for owner, hook in (
        *((owner, "backward") for owner in (pl_module, strategy, plugin)),
        *((owner, "on_before_backward") for owner in (pl_module, *theirs)),
        (plugin, "pre_backward"),
    ):
        # `functools.wraps` gives an override the name of Lightning's module.
        if has_own(owner, hook) or hasattr(getattr(owner, hook), "__wrapped__"):
            return False
    return True


def has_own(owner: Any, hook: str) -> bool:
    """Whether a module, data module or callback overrides a hook of Lightning."""
    return hook in vars(owner) or _overrides(type(owner), (hook,))


@lru_cache(maxsize=256)
def _overrides(kind: type, hooks: tuple[str, ...]) -> bool:
    """Whether a class has one of these hooks, and not from Lightning."""
    own = [getattr(kind, hook) for hook in hooks if hasattr(kind, hook)]
    return any(not each.__module__.startswith(_LIGHTNING) for each in own)
