"""What training changes in objects, kept aside and put back."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset, Sampler

from trainkit.lit.rerun.generators import generator_keeper


class Snapshot:
    """Modules and the attributes of other objects, as they are when it is made.

    Of a module: its parameters, buffers and gradients, and what its attributes hold
    (numbers, tensors, lists, dicts, sets, the states of metrics and of generators). The
    very objects are put back, tensors by value. Other objects that an attribute refers
    to are left as they are. Tensors are kept on the host: a device's memory is what is
    measured meanwhile.

    Args:
        modules: kept with all that is in them.
        others: of these only the attributes themselves, with the generators among
            them, and likewise those of their loaders, samplers and data sets.
    """

    def __init__(self, *modules: Any, others: tuple[Any, ...] = ()) -> None:
        self._put_back: list[Callable[[], None]] = []
        self._seen: dict[int, Any] = {}  # holds the objects, so that ids stay theirs
        for module in modules:
            self._keep(module)
        for other in others:
            self._keep_attributes(other, within=False)

    def restore(self) -> None:
        """Put everything back; may be called again."""
        with torch.no_grad():
            for put_back in self._put_back:
                put_back()

    def _keep(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._keep_tensor(value)
        elif isinstance(value, nn.Module):
            self._keep_attributes(value, within=True)
        elif isinstance(value, dict | list | set | deque):
            self._keep_container(value)
        elif isinstance(value, tuple):
            for each in value:
                self._keep(each)
        else:
            self._keep_generator(value)

    def _keep_tensor(self, tensor: Tensor) -> None:
        if tensor.is_leaf:
            gradient = tensor.grad
            self._put_back.append(lambda: setattr(tensor, "grad", gradient))
            if gradient is not None:
                self._keep(gradient)
        if is_lazy(tensor) or tensor.is_meta:
            return
        kept = tensor.detach().to("cpu", copy=True)
        restore = functools.partial(_restore_tensor, tensor, kept, tensor.device)
        self._put_back.append(restore)

    def _keep_container(self, value: Any) -> None:
        kept = value.copy()
        put = value.extend if isinstance(value, list | deque) else value.update

        def put_back() -> None:
            value.clear()
            put(kept)

        self._put_back.append(put_back)
        for each in kept.values() if isinstance(kept, dict) else kept:
            self._keep(each)

    def _keep_attributes(self, thing: Any, *, within: bool) -> None:
        kept = {name: v for name, v in vars(thing).items() if name != "_iterator"}

        def put_back() -> None:
            # A loader's persistent iterator may have been shut down meanwhile.
            now = {n: v for n, v in vars(thing).items() if n == "_iterator"}
            vars(thing).clear()
            vars(thing).update(kept | now)

        self._put_back.append(put_back)
        for value in kept.values():
            if within:
                self._keep(value)
            elif isinstance(value, DataLoader | Sampler | Dataset):
                if id(value) not in self._seen:
                    self._seen[id(value)] = value
                    self._keep_attributes(value, within=False)
            else:
                self._keep_generator(value)

    def _keep_generator(self, value: Any) -> None:
        put_back = generator_keeper(value)
        if put_back is not None:
            self._put_back.append(put_back)


def _restore_tensor(tensor: Tensor, kept: Tensor, device: torch.device) -> None:
    if tensor.dtype == kept.dtype and tensor.shape == kept.shape:
        tensor.detach().copy_(kept)  # in place: others may be views of it
    else:  # cast by a precision plugin, or resized
        tensor.data = kept.to(device, copy=True)
