"""A `fit` that nobody sees: one callback runs in it, then everything is put back."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import PassThroughProfiler
from torch.utils._pytree import tree_leaves

from trainkit.lit._compat import parts_of
from trainkit.lit.aside import Kept
from trainkit.lit.callback.base import no_callbacks


def fit_aside(
    trainer: Any,
    module: Any,
    data: Any,
    callback: Callback,
    *,
    prepare: Callable[[], None] = lambda: None,
    last: Callable[[], None] = lambda: None,
) -> None:
    """Run `trainer.fit` with one callback, no loggers and no validation.

    Weights, buffers, attributes, metrics, random states and progress are as before
    afterwards, also after an error.

    Args:
        trainer: as it will train.
        module: the module that it will train.
        data: a LightningDataModule, the training loader, several of them, or None.
        callback: ends `fit` itself, with `leaves_fit`.
        prepare: called once Trainer and module are prepared.
        last: called when everything is put back.
    """
    is_module = hasattr(data, "train_dataloader")
    given = {"datamodule" if is_module else "train_dataloaders": data}
    with _put_back(trainer, module, data, last):
        trainer.callbacks = [callback]
        trainer.loggers = [DummyLogger() for _ in trainer.loggers]
        trainer.profiler = PassThroughProfiler()
        trainer.limit_val_batches = 0
        trainer.num_sanity_val_steps = 0
        module.configure_callbacks = no_callbacks
        prepare()
        trainer.fit(module, **given)


@contextlib.contextmanager
def _put_back(
    trainer: Any, module: Any, data: Any, last: Callable[[], None]
) -> Iterator[None]:
    strategy = trainer.strategy
    device = strategy.root_device
    loaders = [each for each in tree_leaves(data) if hasattr(each, "__dict__")]
    others = [*parts_of(trainer), *loaders]
    callbacks = [each for each in trainer.callbacks if hasattr(each, "__dict__")]
    snapshot = Kept(module, others=[*others, *callbacks], steps=True, device=device)
    optimizers = list(strategy.optimizers), list(strategy.lr_scheduler_configs)
    scaling = copy.deepcopy(trainer.precision_plugin.state_dict())
    try:
        yield
    finally:
        snapshot.restore()
        strategy.optimizers, strategy.lr_scheduler_configs = optimizers
        if scaling:
            trainer.precision_plugin.load_state_dict(scaling)
        last()
