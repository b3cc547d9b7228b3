"""Micro-batches on their way to the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from trainkit.core.division import weights_by_term
from trainkit.core.nested import with_tensors
from trainkit.core.strategies import Strategies
from trainkit.lit._compat import as_hook, transfers_plainly
from trainkit.lit.split.micro_batches import CutWindow


class Transfer:
    """Brings micro-batches to the device, with the user's hooks for it.

    To a GPU they are copied from pinned memory, so that the host does not wait.
    Hooks that nobody has are not called: that would cost as much as a small layer.
    Hooks that somebody has may change what a micro-batch weighs. Then all micro-batches
    travel before the first one runs, and are weighed when they have arrived.

    Args:
        trainer: in `fit`.
        pl_module: the module that trains.
        strategies: weigh micro-batches.
        may_repeat: whether loader batches may be needed again. Then tensors that are
            on the device already are copied: micro-batches are views of the loader
            batch, and a training step may write into its batch.

    Attributes:
        is_plain: whether nobody has such a hook.
        is_needed: whether something is done to micro-batches before they run.
    """

    def __init__(
        self,
        trainer: Any,
        pl_module: Any,
        strategies: Strategies,
        *,
        may_repeat: bool,
    ) -> None:
        self._module, self._may_repeat = pl_module, may_repeat
        self._strategies = strategies
        self._device = trainer.strategy.root_device
        self._batch_to_device = trainer.strategy.batch_to_device
        self.is_plain = transfers_plainly(trainer, pl_module)
        is_host = self._device.type == "cpu"
        self.is_needed = may_repeat or not is_host or not self.is_plain

    def bring(self, current: CutWindow) -> Iterator[Any]:
        """The micro-batches of a window on the device, one after another."""
        coming = self._coming(current)
        if self.is_plain or current.are_said:
            return coming
        arrived, number = list(coming), current.num_counting
        weights = weights_by_term(self._strategies, arrived[:number])
        for term, each in weights.items():
            current.weights[term][:number] = each
        return (arrived.pop(0) for _ in current.parts)  # each is let go in its turn

    def _coming(self, current: CutWindow) -> Iterator[Any]:
        for index, part in enumerate(current.parts):
            current.index = index
            yield self._moved(part.batch)

    def _moved(self, batch: Any) -> Any:
        if self._device.type == "cuda":
            batch = with_tensors(batch, _pinned)
        if self._may_repeat:
            batch = with_tensors(batch, self._copied)
        if not self.is_plain:
            with as_hook(self._module, "batch_to_device"):  # as around a loader batch
                return self._batch_to_device(batch)
        if self._device.type == "cpu":
            return batch
        return move_data_to_device(batch, self._device)

    def _copied(self, tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.device == self._device else tensor


def _pinned(tensor: Tensor) -> Tensor:
    is_plain = tensor.is_cpu and tensor.layout == torch.strided
    return tensor.pin_memory() if is_plain else tensor
