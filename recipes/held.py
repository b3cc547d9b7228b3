"""A callback that measures what the graph of a training step holds."""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

MB = 2**20


class HeldMemory(Callback):
    """Logs `held_mb`: the most that the graph of a training step holds at one time.

    That is what autograd keeps for the backward pass, each storage once, without
    parameters.

    Args:
        batches: how many are measured, from the first on.
    """

    def __init__(self, batches: int = 4) -> None:
        self.batches = batches
        self._hooks = ExitStack()
        self._own: set[int] = set()
        self._holders: Counter[int] = Counter()
        self._held = self._most = 0

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self._own = {_address(each) for each in pl_module.parameters()}
        if self.batches > 0:
            self._hooks.enter_context(saved_tensors_hooks(self._pack, _Held.unpack))

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, *_: Any, **__: Any
    ) -> None:
        if self.batches > 0:
            self._hooks.close()
            self.batches -= 1
        pl_module.log("held_mb", self._most / MB)

    def on_exception(self, *_: Any, **__: Any) -> None:
        self._hooks.close()

    def _pack(self, tensor: Tensor) -> _Held:
        held, address = _Held(tensor), _address(tensor)
        if address not in self._own:
            size = tensor.untyped_storage().nbytes()
            weakref.finalize(held, self._release, address, size).atexit = False
            self._holders[address] += 1
            self._held += size if self._holders[address] == 1 else 0
            self._most = max(self._most, self._held)
        return held

    def _release(self, address: int, size: int) -> None:
        self._holders[address] -= 1
        self._held -= 0 if self._holders[address] else size


class _Held:
    """A tensor that a graph holds."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # itself, an output would hold its own graph

    def unpack(self) -> Tensor:
        return self.tensor


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
