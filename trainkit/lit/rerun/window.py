"""All that a window changes before its step, to be put back if it is run again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from trainkit.lit.rerun.generators import generator_keeper, read_states, write_states

FRAMEWORK = frozenset(vars(LightningModule())) | {"_defaults"}
"""What torch, Lightning and torchmetrics keep in a module; no step changes it, except
for the buffers, of which there is a public list."""

PutBack = Callable[[], None]

PLAIN = (int, float, complex, str, bytes, type(None), list, tuple, dict, set, deque)

MOST_ENTRIES = 1000
"""A longer list is a store, whose entries are not looked at."""


class Snapshot:
    """A module's buffers and attributes, those of its metrics, and random generators.

    Of attributes it keeps what they refer to, tensors by value, and the entries of
    lists, sets and dicts, also inside one another; tensors in a list by reference,
    since such a list grows with each batch. Of other objects it keeps those that hold
    plain values alone, such as a meter of the user's own. Parameters are not among it:
    nothing but the step changes them.

    Args:
        pl_module: what trains.
        random: whether to keep the random generators as well, the module's own too.
    """

    def __init__(self, pl_module: Any, *, random: bool = True) -> None:
        self._device = pl_module.device
        self._put_back: list[PutBack] = []
        self._keeps_random = random
        self._seen: set[int] = set()
        for module in pl_module.modules():
            self._keep_buffers(module)
            self._keep_attributes(module)
        self._random = read_states(self._device) if random else None

    def restore(self) -> None:
        with torch.no_grad():
            for put_back in self._put_back:
                put_back()
        if self._random is not None:
            write_states(self._random, self._device)

    def _keep_buffers(self, module: nn.Module) -> None:
        for name, buffer in module.named_buffers(recurse=False):
            self._keep_tensor(buffer)
            # `self.mean = 0.9 * self.mean` puts another tensor in its place.
            self._put_back.append(lambda n=name, b=buffer: setattr(module, n, b))

    def _keep_attributes(self, module: nn.Module) -> None:
        held = vars(module)
        kept = {name: held[name] for name in held.keys() - FRAMEWORK}

        def put_back() -> None:
            for name in held.keys() - kept.keys() - FRAMEWORK:
                del held[name]
            held.update(kept)

        self._put_back.append(put_back)
        for value in kept.values():
            self._keep(value)

    def _keep(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._keep_tensor(value)
        elif type(value) in (list, deque):
            self._put_back.append(_refilled(value, value.extend))
            for each in value if len(value) <= MOST_ENTRIES else ():
                if not isinstance(each, Tensor):
                    self._keep_inner(each)
        elif isinstance(value, dict | set):
            self._put_back.append(_refilled(value, value.update))
            for each in value.values() if isinstance(value, dict) else ():
                self._keep_inner(each)
        elif _holds_plain_values(value):
            held = vars(value)
            self._put_back.append(_refilled(held, held.update))
            for each in held.values():
                self._keep_inner(each)
        elif self._keeps_random and (put_back := generator_keeper(value)) is not None:
            self._put_back.append(put_back)

    def _keep_inner(self, value: Any) -> None:
        """Once each, though it may hold itself."""
        if type(value) in (int, float, str) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._keep(value)

    def _keep_tensor(self, tensor: Tensor) -> None:
        if isinstance(tensor, nn.Parameter):
            return
        value = tensor.detach().clone()
        self._put_back.append(lambda: _write(tensor, value))


def _holds_plain_values(value: Any) -> bool:
    """Whether it is an object that nothing else works on, such as a thread."""
    if isinstance(value, type | nn.Module) or callable(value):
        return False
    held = getattr(value, "__dict__", None)
    return type(held) is dict and all(
        isinstance(each, (*PLAIN, Tensor)) for each in held.values()
    )


def _refilled(container: Any, fill: Callable[[Any], None]) -> PutBack:
    kept = container.copy()

    def put_back() -> None:
        container.clear()
        fill(kept)

    return put_back


def _write(tensor: Tensor, value: Tensor) -> None:
    tensor.detach().copy_(value)


class KeptGradients:
    """A copy of gradients, to begin again with.

    Args:
        parameters: whose gradients.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._kept = [
            (p, None if p.grad is None else p.grad.clone()) for p in parameters
        ]

    def restore(self) -> None:
        for parameter, _ in self._kept:
            parameter.grad = None
        for parameter, gradient in self._kept:
            parameter.grad = None if gradient is None else gradient.clone()


class StashedGradients:
    """Gradients put away while something else is in their place.

    Args:
        parameters: whose gradients.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._held = [(p, p.grad) for p in parameters]
        for parameter, _ in self._held:
            parameter.grad = None

    def put_back(self) -> None:
        for parameter, gradient in self._held:
            parameter.grad = gradient
