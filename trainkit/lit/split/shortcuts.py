"""Shorter ways for Lightning's calls around a micro-batch, without unused hooks.

A call of a hook costs as much as a small layer, even if nothing implements the hook,
and a split window would make it for every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from trainkit.core.nested import with_tensors
from trainkit.lit._compat import (
    as_hook,
    has_own,
    has_plain_backward,
    is_listened_to,
    scaler_of,
    transfers_plainly,
)

TRANSFER = ("batch_to_device", "transfer_batch_to_device", "on_after_batch_transfer")
"""The hooks on a batch's way to the device, in which Lightning logs nothing."""

Backward = Callable[..., Any]
Move = Callable[[Any], Any]


def backward_of(trainer: Any, pl_module: Any, windows: Any) -> Backward:
    """A function that runs a backward pass as Lightning's strategy object does.

    Args:
        trainer: in `fit`.
        pl_module: the module that trains.
        windows: the callback that weighs the loss before the pass.
    """
    hooks = ("on_before_backward", "on_after_backward")
    if (
        scaler_of(trainer) is not None
        or not has_plain_backward(trainer)
        or is_listened_to(hooks, trainer, pl_module, apart_from=windows)
    ):
        return trainer.strategy.backward
    run = trainer.precision_plugin.backward
    takes_seed = not has_own(pl_module, "backward")

    def backward(loss: Tensor, optimizer: Any, **options: Any) -> None:
        seed = windows.weigh(loss, as_seed=takes_seed)
        if seed is None:
            run(loss, pl_module, optimizer, **options)
        else:
            run(loss, pl_module, optimizer, gradient=seed, **options)
        windows.on_after_backward(trainer, pl_module)

    return backward


def transfer_of(trainer: Any, pl_module: Any, *, may_repeat: bool) -> Move:
    """A function that brings a micro-batch to the device, with the user's hooks for it.

    Args:
        trainer: in `fit`.
        pl_module: the module that trains.
        may_repeat: whether the loader batch may be needed again. Then tensors that are
            on the device already are copied: micro-batches are views of the loader
            batch, and a training step may write into its batch.
    """
    device = trainer.strategy.root_device
    move = _move_of(trainer, pl_module, device)
    if not may_repeat:
        return move
    return lambda batch: move(_with_copies(batch, device))


def _move_of(trainer: Any, pl_module: Any, device: torch.device) -> Move:
    if not transfers_plainly(trainer, pl_module):
        move = trainer.strategy.batch_to_device

        def move_through_hooks(batch: Any) -> Any:
            with as_hook(pl_module, TRANSFER[0]):  # as around a loader batch
                return move(batch)

        return move_through_hooks
    if device.type == "cpu":
        return _as_it_is
    return lambda batch: move_data_to_device(batch, device)


def _with_copies(batch: Any, device: torch.device) -> Any:
    return with_tensors(batch, lambda t: t.clone() if t.device == device else t)


def _as_it_is(batch: Any) -> Any:
    return batch
