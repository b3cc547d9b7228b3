"""What a forward pass depends on besides its arguments: kept, and put back for the
second pass."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from trainkit.core.batch_norm.layers import listed
from trainkit.errors import TrainkitError

Settings = dict[tuple[nn.Module, str], object]

KINDS = frozenset({int, float, bool, str})
OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""The attributes that torch gives each module."""

MANY = 2**16
"""Of larger tensors so many entries are looked at."""


def settings_of(module: nn.Module) -> Settings:
    """The numbers and words in attributes of a module and of those in it; the modes of
    its layers are among them."""
    return {
        (each, name): value
        for each in module.modules()
        for name, value in vars(each).items()
        if type(value) in KINDS and name not in OF_TORCH
    }


def changed(before: Settings, after: Settings) -> set[tuple[nn.Module, str]]:
    """The attributes that are other ones than before."""
    if before == after:
        return set()
    both = before.keys() & after.keys()
    return (before.keys() ^ after.keys()) | {k for k in both if before[k] != after[k]}


def put_back(settings: Settings, where: Collection[tuple[nn.Module, str]]) -> None:
    """Give attributes the values that they had."""
    for module, name in where:
        if (module, name) in settings:
            vars(module)[name] = settings[module, name]
        else:
            vars(module).pop(name, None)


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place, where torch counts that."""
    return 0 if tensor.is_inference() else tensor._version


class Moment:
    """A module at the moment of a call.

    In the second pass the modes of its layers, the numbers in its attributes, what
    trains, and autocast are as they were. Weights must not have changed: that is
    refused, as torch refuses it.

    Args:
        module: which is called.
        name: of the module, for messages.
        devices: of its arguments.

    Attributes:
        parameters: the parameters that train.
        settings: the numbers and words in attributes.
    """

    def __init__(
        self, module: nn.Module, name: str, devices: Iterable[torch.device]
    ) -> None:
        self._module, self._name = module, name
        self.settings = settings_of(module)
        self._flags = [(p, p.requires_grad) for p in module.parameters()]
        self.parameters: list[Tensor] = [p for p, trains in self._flags if trains]
        self._left_out: set[str] = set()
        self._state = self._state_now()
        kinds = sorted({"cpu", *(device.type for device in devices)})
        self._autocast = [
            (each, torch.get_autocast_dtype(each), torch.is_autocast_enabled(each))
            for each in kinds
        ]
        self._caches = torch.is_autocast_cache_enabled()

    def check_weights(self, *, with_buffers: bool = True) -> None:
        """Refuse weights and buffers that were changed since."""
        moved = self.moved()
        if moved and not with_buffers:
            names = {name for name, _ in self._module.named_parameters()}
            moved = [name for name in moved if name in names]
        if moved:
            raise TrainkitError(
                f"{self._name}: its weights and buffers must stay as they are between "
                f"the forward and the backward pass, and {listed(moved)} changed. Call "
                f"backward before the optimizer steps, and within functional_call."
            )

    def check_state(self) -> None:
        """Refuse weights and buffers that the forward pass has moved: once for each
        chunk."""
        if moved := self.moved():
            self._refuse_moved(moved)

    def leave_out(self, names: Collection[str]) -> None:
        """Let these weights and buffers change."""
        self._left_out |= set(names)
        self._state = self._state_now()

    def moved(self) -> list[str]:
        """The names of the weights and buffers that were changed since."""
        now = self._state_now()
        if now == self._state:
            return []
        names = [*self._state, *now.keys() - self._state.keys()]
        return [each for each in names if self._state.get(each) != now.get(each)]

    def _state_now(self) -> dict[str, tuple[int, int]]:
        return {
            name: (id(each), version_of(each))
            for name, each in _own_tensors(self._module)
            if name not in self._left_out
        }

    def sums(self) -> dict[str, float]:
        """The sum of each weight and buffer, which also shows what is written behind
        torch's back, such as by `.data`; waits for the device."""
        return {
            name: _some_of(each.detach()).sum(dtype=torch.float64).item()
            for name, each in _own_tensors(self._module)
            if type(each) in (Tensor, nn.Parameter)
            and each.layout is torch.strided
            and not (each.is_complex() or each.is_quantized or each.is_meta)
        }

    def check_sums(self, before: dict[str, float]) -> None:
        """Refuse weights and buffers that have other sums than before."""
        now = self.sums()
        if moved := [name for name in before if repr(before[name]) != repr(now[name])]:
            self._refuse_moved(moved)

    def _refuse_moved(self, moved: list[str]) -> NoReturn:
        raise TrainkitError(
            f"{self._name}: its forward pass must not move buffers or weights, "
            f"which each part of a batch would do once more, and it moved "
            f"{listed(moved)}. "
            f"Name a module within it, or put the layer into evaluation mode. If that "
            f"is a cache, fill it before, by a call with the longest rows."
        )

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Attributes, flags and autocast as they were, for a while."""
        now = settings_of(self._module)
        put_back(self.settings, changed(self.settings, now))
        flags = [(p, p.requires_grad) for p, _ in self._flags]
        _set_flags(flags, self._flags)
        try:
            with ExitStack() as stack:
                for kind, dtype, is_on in self._autocast:
                    stack.enter_context(
                        torch.autocast(
                            kind, dtype, enabled=is_on, cache_enabled=self._caches
                        )
                    )
                yield
        finally:
            put_back(now, changed(now, settings_of(self._module)))
            _set_flags(self._flags, flags)


def _set_flags(
    now: Sequence[tuple[Any, bool]], wanted: Sequence[tuple[Any, bool]]
) -> None:
    for (parameter, is_on), (_, flag) in zip(now, wanted, strict=True):
        if is_on != flag:
            parameter.requires_grad_(flag)


def _some_of(value: Tensor) -> Tensor:
    """Its entries, or some of them where they are many."""
    step = value.numel() // MANY
    return value.view(-1)[::step] if step > 1 and value.is_contiguous() else value


def _own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]
