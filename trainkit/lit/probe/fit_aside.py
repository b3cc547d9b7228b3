"""A `fit` that nobody sees: one callback runs in it, then everything is put back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import PassThroughProfiler
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, Sampler

from trainkit.core.generators import generator_keeper
from trainkit.errors import TrainkitError
from trainkit.lit._compat import parts_of
from trainkit.lit.aside import Kept
from trainkit.lit.callback.base import no_callbacks

ITERATOR = "_iterator"


def refuse_other_kinds(door: str, trainer: Any, module: Any) -> None:
    """Refuse what is no Trainer or no LightningModule, of either package."""
    for name, value, kind, part in (
        ("trainer", trainer, "Trainer", "fit_loop"),
        ("module", module, "LightningModule", "configure_optimizers"),
    ):
        if isinstance(value, type) or not hasattr(value, part):
            found = f"the class {value.__name__}" if isinstance(value, type) else ""
            raise TrainkitError(
                f"{door} {name}: must be a {kind} of Lightning, received "
                f"{found or type(value).__name__}. Pass an object; a net by itself "
                f"goes into a LightningModule."
            )


def fit_aside(
    trainer: Any,
    module: Any,
    data: Any,
    callback: Callback,
    *,
    prepare: Callable[[], None] = lambda: None,
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
    """
    is_module = hasattr(data, "train_dataloader")
    given = {"datamodule" if is_module else "train_dataloaders": data}
    strategy, plugin = trainer.strategy, trainer.precision_plugin
    kept = Kept(module, steps=True, device=strategy.root_device)
    things = [*parts_of(trainer), *tree_leaves(data), *trainer.callbacks]
    attributes = _attributes_of([each for each in things if hasattr(each, "__dict__")])
    optimizers = list(strategy.optimizers), list(strategy.lr_scheduler_configs)
    scaling = copy.deepcopy(plugin.state_dict())
    try:
        trainer.callbacks = [callback]
        trainer.loggers = [DummyLogger() for _ in trainer.loggers]
        trainer.profiler = PassThroughProfiler()
        trainer.limit_val_batches = trainer.num_sanity_val_steps = 0
        vars(module)["configure_callbacks"] = no_callbacks
        prepare()
        trainer.fit(module, **given)
    finally:
        kept.restore()
        for put_back in attributes:
            put_back()
        strategy.optimizers, strategy.lr_scheduler_configs = optimizers
        if scaling:
            plugin.load_state_dict(scaling)


def _attributes_of(things: list[Any]) -> list[Callable[[], None]]:
    """What puts the attributes of a Trainer's parts, callbacks and loaders back, and
    the generators of loaders, of their samplers and of their data sets."""
    found: dict[int, Any] = {}
    put_back: list[Callable[[], None]] = []
    while things:
        thing = things.pop()
        if id(thing) in found:
            continue
        found[id(thing)] = thing
        # A loader's persistent iterator may have been shut down meanwhile.
        kept = {name: value for name, value in vars(thing).items() if name != ITERATOR}
        put_back.append(partial(_put_attributes, thing, kept))
        for value in kept.values():
            if isinstance(value, DataLoader | Sampler | Dataset):
                things.append(value)
            elif generator := generator_keeper(value):
                put_back.append(generator)
    return put_back


def _put_attributes(thing: Any, kept: dict[str, Any]) -> None:
    for name in vars(thing).keys() - kept.keys() - {ITERATOR}:
        delattr(thing, name)
    vars(thing).update(kept)
