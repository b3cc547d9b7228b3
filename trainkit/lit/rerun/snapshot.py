"""What training changes in modules and other objects, kept and put back."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from operator import is_
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset, Sampler

from trainkit.core.bare import is_a, names_in
from trainkit.core.generators import (
    generator_keeper,
    is_generator,
    read_states,
    write_states,
)
from trainkit.lit.rerun.hidden import (
    CACHING,
    WRAPPERS,
    behind,
    cache_keeper,
    is_of_framework,
    places_of,
)

FRAMEWORK = frozenset(vars(LightningModule())) | {"_defaults"}
"""What torch, Lightning and torchmetrics keep in a module; `training_step` changes none
of it but the buffers, which have a public list."""

VALUES = (int, float, complex, bool, str, bytes, type(None))
CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, deque, set)
PLAIN = (*VALUES, *CONTAINERS, tuple, Tensor, np.ndarray, FunctionType, *WRAPPERS)

MOST_BYTES = 2**26
"""A larger array of NumPy is data, which training reads."""

MOST_ENTRIES = 1000
"""A longer list or dict is a store, whose entries are not looked at."""


class Snapshot:
    """The state of modules and other objects, as it is when the snapshot is made.

    Of a module it keeps the buffers, and what the attributes hold: numbers, tensors,
    lists, sets and dicts, random generators, the states of metrics, and objects that
    hold plain values alone, such as a meter of the user's own. It keeps slots as
    attributes, and so the cells, attributes and defaults of functions. The very objects
    are put back, tensors by value. Tensors in a list are put back by reference, because
    such a list grows with each batch. Other objects are left as they are.

    Args:
        things: modules, or containers of them.
        others: objects of which only the attributes themselves are kept, with the
            generators among them, and likewise the attributes of their loaders,
            samplers and data sets.
        around_steps: whether optimizers may step before the state is put back. Then
            parameters, gradients, and tensors in lists and tuples are kept by value
            too, and the copies on the host, because a device's memory is what is
            measured meanwhile. Objects are left as they are.
        generators: whether to keep the random generators that the modules hold.
        device: keep the global random generators as well, this device's among them.
        leave_out: modules that stay as they are.
        only_buffers: keep no attributes of modules.
        by_value: whether to keep tensors and arrays, which are copied.
        names: of the things; those of other things are their attributes' paths.

    Attributes:
        iterators: the names of what holds iterators, or by value files, which cannot be
            put back.
        lost: the names of caches that could not be put back.
    """

    def __init__(
        self,
        *things: Any,
        others: Iterable[Any] = (),
        around_steps: bool = False,
        generators: bool = True,
        device: torch.device | None = None,
        leave_out: Iterable[nn.Module] = (),
        only_buffers: bool = False,
        by_value: bool = True,
        names: Iterable[str] = (),
    ) -> None:
        self._by_value = by_value
        self._around_steps = around_steps
        self._generators = generators
        self._device = device
        self._only_buffers = only_buffers
        self._put_back: list[Callable[[], None]] = []
        self._place, self._waiting = "", list[tuple[str, Any]]()
        self.iterators: dict[str, None] = {}
        self.lost: dict[str, None] = {}
        # It holds the objects, so that no other object gets one of their ids.
        self._seen: dict[int, Any] = {id(each): each for each in leave_out}
        with _no_collection():
            for self._place, thing in zip_longest(names, things, fillvalue=""):
                self._keep(thing)
            for other in others:
                self._keep_attributes(other, within=False)
            while self._waiting:
                self._place, value = self._waiting.pop()
                self._keep_content(value)
        self._random = None if device is None else read_states(device)

    def restore(self) -> None:
        """Put everything back, also if something fails; may be called again."""
        failed = None
        with torch.no_grad():
            for put_back in self._put_back:
                try:
                    put_back()
                except Exception as error:
                    failed = error
        if self._random is not None:
            assert self._device is not None
            write_states(self._random, self._device)
        if failed is not None:
            raise failed

    def _keep(self, value: Any) -> None:
        if type(value) not in VALUES and not self._was_seen(value):
            self._waiting.append((self._place, value))

    def _keep_content(self, value: Any) -> None:
        if is_a(value, Tensor, np.ndarray):
            if self._by_value:
                (self._keep_tensor if is_a(value, Tensor) else self._keep_array)(value)
        elif is_a(value, nn.Module):
            for path, module in value.named_modules():
                if module is value or not self._was_seen(module):
                    self._keep_module(module, f"{path}.".lstrip("."))
        elif is_a(value, tuple):
            if self._around_steps or len(value) <= MOST_ENTRIES:
                self._keep_entries(value)
        elif is_a(value, *CONTAINERS):
            self._keep_container(value)
        else:
            self._keep_object(value)

    def _was_seen(self, value: Any) -> bool:
        if id(value) in self._seen:
            return True
        self._seen[id(value)] = value
        return False

    def _keep_tensor(self, tensor: Tensor) -> None:
        if self._around_steps and tensor.is_leaf:
            gradient = tensor.grad
            self._put_back.append(lambda: setattr(tensor, "grad", gradient))
            if gradient is not None:
                self._keep(gradient)
        is_stepped = isinstance(tensor, nn.Parameter) and not self._around_steps
        if is_stepped or is_lazy(tensor) or tensor.is_meta:
            return
        place = "cpu" if self._around_steps else tensor.device
        kept = tensor.detach().to(place, copy=True)
        self._put_back.append(functools.partial(_restore, tensor, kept, tensor.device))

    def _keep_module(self, module: nn.Module, path: str) -> None:
        if not self._around_steps:  # which keeps the attribute that holds them
            self._keep_buffers(module)
        if not self._only_buffers:
            self._keep_attributes(module, within=True, path=path)

    def _keep_buffers(self, module: nn.Module) -> None:
        for name, buffer in module.named_buffers(recurse=False):
            self._keep(buffer)
            # `self.mean = 0.9 * self.mean` puts another tensor in its place.
            put = functools.partial(setattr, module, name, buffer)
            self._put_back.append(put)

    def _keep_container(self, value: Any) -> None:
        put_back, kept = container_keeper(value)
        self._put_back.append(put_back)
        if not self._around_steps and len(kept) > MOST_ENTRIES:
            return
        if isinstance(kept, dict):
            for each in kept.values():
                self._keep(each)
        else:
            self._keep_entries(kept)

    def _keep_entries(self, entries: Iterable[Any]) -> None:
        for each in entries:
            if self._around_steps or not is_a(each, Tensor):
                self._keep(each)

    def _keep_attributes(self, thing: Any, *, within: bool, path: str = "") -> None:
        # A loader's persistent iterator may have been shut down meanwhile.
        left = FRAMEWORK if within and not self._around_steps else {"_iterator"}
        held = vars(thing)
        kept = {name: value for name, value in held.items() if name not in left}

        def put_back() -> None:
            for name in held.keys() - kept.keys() - left:
                del held[name]
            held.update(kept)

        self._put_back.append(put_back)
        for name, value in kept.items():
            self._place = path + name
            if within:
                self._keep(value)
            elif not is_a(value, DataLoader, Sampler, Dataset):
                self._keep_generator(value)
            elif not self._was_seen(value):
                self._keep_attributes(value, within=False)

    def _keep_array(self, array: np.ndarray) -> None:
        if array.flags.writeable and array.nbytes <= MOST_BYTES:
            kept = array.copy()
            self._put_back.append(lambda: np.copyto(array, kept))

    def _keep_object(self, value: Any) -> None:
        if self._keep_generator(value) or self._around_steps:
            return
        is_function = is_a(value, FunctionType)
        if is_function:
            if is_of_framework(value.__module__):
                return
        elif is_a(value, CACHING):
            put_back = cache_keeper(value)
            self._put_back.append(lambda: self.lost.update(put_back()))
        for each in behind(value):
            self._keep(each)
        if is_function or holds_plain_values(value):
            self._keep_names_and_places(value)
        elif is_iterator(value) or self._by_value and is_a(value, io.IOBase):
            self.iterators[self._place] = None

    def _keep_names_and_places(self, value: Any) -> None:
        held = names_in(value)
        if held:
            self._keep_container(held)
        elif type(held) is dict:
            self._put_back.append(held.clear)
        for place in places_of(value):
            self._put_back.append(place.put_back)
            self._keep(place.kept)

    def _keep_generator(self, value: Any) -> bool:
        """Whether the value is a random generator."""
        put_back = generator_keeper(value)
        if put_back is not None and self._generators:
            self._put_back.append(put_back)
        return put_back is not None


@contextlib.contextmanager
def kept(*things: Any, **options: Any) -> Iterator[None]:
    """A context after which things are as before; the options are a `Snapshot`'s."""
    snapshot = Snapshot(*things, **options)
    try:
        yield
    finally:
        snapshot.restore()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Python looks for no cycles meanwhile: nothing becomes garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def container_keeper(value: Any) -> tuple[Callable[[], None], Any]:
    """What puts the very entries of a container back, and these entries."""
    # By the methods of Python's own types: a subclass may refuse, count, or take
    # other arguments.
    kind = next(kind for kind in CONTAINERS if isinstance(value, kind))
    is_dict = issubclass(kind, dict)
    kept = dict(kind.items(value)) if is_dict else list(kind.__iter__(value))
    put = kind.extend if issubclass(kind, list | deque) else kind.update

    def put_back() -> None:
        if not _is_as_before(kind, value, kept):  # a set would change its order
            kind.clear(value)
            put(value, kept)

    return put_back, kept


def _is_as_before(kind: Any, value: Any, kept: Any) -> bool:
    """Whether a container holds the very objects that it held, in that order."""
    if kind.__len__(value) != len(kept) or not all(
        map(is_, kind.__iter__(value), kept)
    ):
        return False
    return not isinstance(kept, dict) or all(
        map(is_, kind.values(value), kept.values())
    )


def holds_plain_values(value: Any, depth: int = 3) -> bool:
    """Whether it is an object that nothing else works on, as on a lock; objects in it
    may be such again."""
    if is_a(value, type, nn.Module, ModuleType, io.IOBase) or not depth:
        return False
    if is_iterator(value) and not is_a(type(value).__next__, FunctionType):
        return False
    held, places = names_in(value), places_of(value)
    values = held.values() if type(held) is dict else ()
    return (type(held) is dict or bool(places)) and all(
        is_a(each, *PLAIN)
        or is_generator(each)
        or is_iterator(each)
        or holds_plain_values(each, depth - 1)
        for each in (*values, *(place.kept for place in places))
    )


def is_iterator(value: Any) -> bool:
    """Whether it gives values one by one; a file rather takes them."""
    return is_a(value, Iterator) and not is_a(value, io.IOBase)


def _restore(tensor: Tensor, kept: Tensor, device: torch.device) -> None:
    is_as_before = tensor.is_nested or tensor.shape == kept.shape
    if tensor.dtype == kept.dtype and is_as_before:
        tensor.detach().copy_(kept)  # in place: others may be views of it
    else:  # cast by a precision plugin, or resized
        tensor.data = kept.to(device, copy=True)
