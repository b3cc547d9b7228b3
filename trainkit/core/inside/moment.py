"""What a forward pass depends on besides its arguments: kept, and put back for the
second pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.core.batch_norm.layers import listed
from trainkit.core.generators import States
from trainkit.core.inside.rows import Arguments
from trainkit.core.nested import is_dense
from trainkit.errors import TrainkitError

Settings = dict[tuple[nn.Module, str], object]
Modes = tuple[bool, tuple[tuple[bool, torch.dtype], ...]]
"""Whether gradients are on; whether autocast is, and to what, by kinds of device."""

State = dict[tuple[nn.Module, str], tuple[Any, ...]]
"""Which weights and buffers modules have, by their names, how often each was changed,
whether it trains, and its sum."""

KINDS = frozenset({int, float, bool, str})
OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""The attributes that torch gives each module."""


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """The attributes and buffers of a module and of those in it, by their paths."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, each in module.named_modules()
        for name, value in (vars(each) | each._buffers).items()
    }


def modules_of(module: nn.Module) -> list[nn.Module]:
    """A module and those in it, in any order, sooner than with their paths."""
    found: dict[nn.Module, None] = {}
    waiting = [module]
    while waiting:
        each = waiting.pop()
        if each not in found:
            found[each] = None
            waiting += each.children()
    return list(found)


def settings_of(module: nn.Module) -> Settings:
    """The numbers and words in attributes of a module and of those in it; the modes of
    its layers are among them."""
    return {
        (each, name): value
        for each in modules_of(module)
        for name, value in vars(each).items()
        if type(value) in KINDS and name not in OF_TORCH
    }


def put_back(module: nn.Module, settings: Settings) -> Settings:
    """Give attributes the values that they had; which they have now."""
    now = settings_of(module)
    if now == settings:
        return now
    for place, name in now.keys() - settings.keys():
        del vars(place)[name]
    for (place, name), value in settings.items():
        vars(place)[name] = value
    return now


def versions_of(values: Iterable[Any]) -> list[tuple[int, int]]:
    """Which tensors these are, and how often each was changed in place, where torch
    counts that."""
    return [
        (id(each), 0 if each.is_inference() else each._version)
        for each in values
        if isinstance(each, Tensor)
    ]


class Surroundings:
    """Reads and sets what operations on some devices depend on besides arguments.

    Args:
        devices: of the batch.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = list(devices)
        kinds = {"cpu", *[each.type for each in self._devices]}
        self._kinds = sorted(kinds - {"meta"})

    def now(self) -> Modes:
        """Whether gradients are on, and what autocast does."""
        are_on = map(torch.is_autocast_enabled, self._kinds)
        dtypes = map(torch.get_autocast_dtype, self._kinds)
        return torch.is_grad_enabled(), tuple(zip(are_on, dtypes, strict=True))

    def enter(self, modes: Modes) -> None:
        """Set what `now` has read."""
        torch.set_grad_enabled(modes[0])
        for kind, (is_on, dtype) in zip(self._kinds, modes[1], strict=True):
            torch.set_autocast_enabled(kind, is_on)
            torch.set_autocast_dtype(kind, dtype)

    @contextlib.contextmanager
    def kept(self, modes: Modes | None = None) -> Iterator[None]:
        """Within it, modes are set that `now` has read; at its end they are as before.
        Autocast keeps no copies of weights, since one that was made without a graph
        would be used with it later."""
        before, caches = self.now(), torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            if modes is not None:
                self.enter(modes)
            yield
        finally:
            self.enter(before)
            torch.set_autocast_cache_enabled(caches)

    def random(self) -> States:
        """The states of torch's generators."""
        return States(self._devices, of_host=False)


class Moment:
    """What a module that is called, and what surrounds it, is like at one moment.

    In the second pass the modes of its layers, the numbers in its attributes, and
    autocast are as they were. Weights must not have changed, nor which of them train:
    that is refused, as torch refuses it.

    Args:
        module: that is called.
        name: of it, for messages.
        arguments: of the call.

    Attributes:
        settings: the numbers and words in attributes.
    """

    def __init__(self, module: nn.Module, name: str, arguments: Arguments) -> None:
        self._module, self._name, self.settings = module, name, settings_of(module)
        self._state, self._values = self.state(), versions_of(arguments.values)
        self._surroundings = Surroundings(arguments.devices)
        self._modes = self._surroundings.now()

    def state(self, *, has_sums: bool = False) -> State:
        """Which weights and buffers the module has, and how often each was changed.

        Args:
            has_sums: with their sums, which also show what is written behind torch's
                back, such as by `.data`; they wait for the device.
        """
        named = {
            (each, name): held
            for each in modules_of(self._module)
            for name, held in (*each._parameters.items(), *each._buffers.items())
            if held is not None
        }
        versions = zip(named.items(), versions_of(named.values()), strict=True)
        found: State = {place: (*two, x.requires_grad) for (place, x), two in versions}
        for place, each in named.items() if has_sums else ():
            is_plain = type(each) in (Tensor, nn.Parameter) and is_dense(each)
            is_odd = each.is_complex() or each.is_quantized or each.is_meta
            if is_plain and not is_odd:
                total = each.detach().sum(dtype=torch.float64).item()
                found[place] = *found[place], repr(total)
        return found

    def check_weights(self) -> None:
        """Refuse weights and buffers that were changed since the forward pass."""
        if moved := self._moved(self._state, self.state()):
            raise TrainkitError(
                f"{self._name}: its weights and buffers must stay as they are, and "
                f"frozen or not, between the forward and the backward pass, and "
                f"{listed(moved)} changed. Call backward before the optimizer steps, "
                f"and within functional_call."
            )

    def check_state(self, values: Sequence[Any], before: State | None = None) -> None:
        """Refuse weights, buffers and arguments that the forward pass has moved: once
        for each chunk.

        Args:
            values: the arguments.
            before: the state, if sums are looked at too.
        """
        now = self.state(has_sums=before is not None)
        if moved := self._moved(before or self._state, now):
            raise TrainkitError(
                f"{self._name}: its forward pass must not move buffers or weights, "
                f"which each part of a batch would do once more, and it moved "
                f"{listed(moved)}. Name a module within it, or "
                f"put the layer into evaluation mode. If that is a cache, fill it "
                f"before, by a call with the longest rows."
            )
        if versions_of(values) != self._values:
            raise TrainkitError(
                f"{self._name}: its forward pass must not change its arguments in "
                f"place, since it runs once more in the backward pass. Give it a "
                f"clone(), or name a module within it."
            )

    def _moved(self, before: State, now: State) -> list[str]:
        """The names of the weights and buffers that differ."""
        if before == now:
            return []
        paths = {each: path for path, each in self._module.named_modules()}
        moved = [x for x in {**before, **now} if before.get(x) != now.get(x)]
        return [f"{paths.get(each, '')}.{name}".lstrip(".") for each, name in moved]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Attributes, flags and autocast as they were, for a while."""
        now = put_back(self._module, self.settings)
        try:
            with self._surroundings.kept(self._modes):
                yield
        finally:
            put_back(self._module, now)
