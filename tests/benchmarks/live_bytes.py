"""The most bytes that a piece of work holds at once, on any device."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts what operators make, as long as it lives: a graph, outputs, gradients.

    What an operator needs inside is not seen, nor is what was there before.

    Attributes:
        peak: the most bytes at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        given = {_storage(each)._cdata for each in _tensors((args, kwargs))}
        for each in _tensors(output):
            storage = _storage(each)
            if storage._cdata not in given and storage._cdata not in self._known:
                self._count(storage)
        return output

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()

        def freed(_: Any) -> None:
            self._now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, freed)
        self._now += size
        self.peak = max(self.peak, self._now)


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _storage(tensor: Tensor) -> Any:
    return tensor.untyped_storage()
