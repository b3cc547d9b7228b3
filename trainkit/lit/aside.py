"""What a step that will not count has changed, put back on the live module.

It serves three: a loader batch that runs again after memory ran out, the finder of
sizes, and micro-batches that only fill places. Whatever can run on a copy does so.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset, Sampler
from torchmetrics import Metric, MetricCollection

from trainkit.core.batches import tensors
from trainkit.core.generators import generator_keeper, read_states, write_states

FRAMEWORK = frozenset(vars(LightningModule())) | {"_defaults"}
"""What torch, Lightning and torchmetrics keep in a module."""

CONTAINERS = (OrderedDict, dict, list, deque, set)

DEPTH = 3
"""How deep attributes are looked into: an object or a container, and what it holds."""


class Kept:
    """The state of modules and other objects, as it is when this is made.

    Of a module it keeps buffers, and what its attributes hold: tensors by value, the
    entries of containers, generators, and the attributes of plain objects. What is
    deeper is left as it is.

    Args:
        modules: whose state.
        others: objects of which the attributes themselves are kept, and generators.
        steps: whether optimizers may step: parameters and gradients are kept too, on
            the host, because a device's memory is what is measured meanwhile.
        device: keep the global random generators as well, this device's among them.
        leave_out: modules that stay as they are.
        only_buffers: keep no attributes of modules.
        generators: whether to keep the random generators that modules hold.
    """

    def __init__(
        self,
        *modules: nn.Module,
        others: Iterable[Any] = (),
        steps: bool = False,
        device: torch.device | None = None,
        leave_out: Iterable[nn.Module] = (),
        only_buffers: bool = False,
        generators: bool = True,
    ) -> None:
        self._steps, self._generators, self._device = steps, generators, device
        self._put_back: list[Callable[[], None]] = []
        self._seen: dict[int, Any] = {id(each): each for each in leave_out}
        self._owners: dict[int, Any] = {}
        for module in modules:
            for each in module.modules():
                if id(each) not in self._seen or each is module:
                    self._keep_module(each, only_buffers=only_buffers)
        for each in others:
            self._keep_attributes(each)
        self._random = None if device is None else read_states(device)

    def restore(self) -> None:
        """Put everything back; may be called again."""
        with torch.no_grad():
            for put_back in self._put_back:
                put_back()
        if self._random is not None:
            assert self._device is not None
            write_states(self._random, self._device)

    def _keep_module(self, module: nn.Module, *, only_buffers: bool) -> None:
        held: dict[str, Any] = dict(module.named_buffers(recurse=False))
        if self._steps:
            held |= dict(module.named_parameters(recurse=False))
        for name, tensor in held.items():
            self._keep(tensor, DEPTH)
            # `self.mean = 0.9 * self.mean` puts another tensor in its place.
            put = module._parameters if name in module._parameters else module._buffers
            self._put_back.append(lambda n=name, t=tensor, p=put: p.__setitem__(n, t))
        if not only_buffers:
            left = frozenset() if self._steps else FRAMEWORK
            self._keep_entries(vars(module), DEPTH, without=left)

    def _keep(self, value: Any, depth: int) -> None:
        if id(value) in self._seen or isinstance(value, nn.Module | type):
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._keep_tensor(value)
        elif isinstance(value, np.ndarray):
            if value.flags.writeable and value.nbytes < 2**26:
                kept = value.copy()
                self._put_back.append(lambda: np.copyto(value, kept))
        elif isinstance(value, CONTAINERS):
            self._keep_entries(value, depth - 1)
        elif isinstance(value, tuple):
            for each in value if depth else ():
                self._keep(each, depth - 1)
        elif not self._keep_generator(value) and depth and not self._steps:
            held = getattr(value, "__dict__", None)
            if isinstance(held, dict) and all(map(_is_plain, held.values())):
                self._keep_entries(held, depth - 1)

    def _keep_entries(
        self, held: Any, depth: int, *, without: frozenset[str] = frozenset()
    ) -> None:
        kind = _kind_of(held)
        if not issubclass(kind, dict):
            entries = list(held)
            put = kind.extend if issubclass(kind, list | deque) else kind.update

            def put_entries_back() -> None:
                kind.clear(held)
                put(held, entries)

            self._put_back.append(put_entries_back)
            for each in entries if depth and len(entries) < 1000 else ():
                # A list of tensors grows with each batch; they do not change.
                if self._steps or not isinstance(each, Tensor):
                    self._keep(each, depth)
            return
        kept = {name: each for name, each in held.items() if name not in without}

        def put_back() -> None:
            for name in [n for n in held if n not in kept and n not in without]:
                del held[name]
            held.update(kept)

        self._put_back.append(put_back)
        for each in kept.values() if depth and len(kept) < 1000 else ():
            self._keep(each, depth)

    def _keep_tensor(self, tensor: Tensor) -> None:
        if self._steps and tensor.is_leaf:
            gradient = tensor.grad
            self._put_back.append(lambda: setattr(tensor, "grad", gradient))
            if gradient is not None:
                self._keep(gradient, 0)
        if is_lazy(tensor) or tensor.is_meta:
            return
        if isinstance(tensor, nn.Parameter) and not self._steps:
            return
        device = tensor.device
        kept = tensor.detach().to("cpu" if self._steps else device, copy=True)

        def put_back() -> None:
            is_like = tensor.is_nested or tensor.shape == kept.shape
            if tensor.dtype == kept.dtype and is_like:
                tensor.detach().copy_(kept)  # in place: others may be views of it
            else:  # cast by a precision plugin, or resized
                tensor.data = kept.to(device, copy=True)

        self._put_back.append(put_back)

    def _keep_generator(self, value: Any) -> bool:
        put_back = generator_keeper(value)
        if put_back is not None and self._generators:
            self._put_back.append(put_back)
        return put_back is not None

    def _keep_attributes(self, thing: Any) -> None:
        """Keep what the attributes of a Trainer's part or a loader are."""
        if id(thing) in self._owners:
            return
        self._owners[id(thing)] = thing
        # A loader's persistent iterator may have been shut down meanwhile.
        held, left = vars(thing), {"_iterator"}
        kept = {name: value for name, value in held.items() if name not in left}

        def put_back() -> None:
            for name in held.keys() - kept.keys() - left:
                del held[name]
            held.update(kept)

        self._put_back.append(put_back)
        for value in kept.values():
            if isinstance(value, DataLoader | Sampler | Dataset):
                self._keep_attributes(value)
            else:
                self._keep_generator(value)


def _kind_of(container: object) -> Any:
    """Python's own type of a container: a subclass may refuse, or take others."""
    return next(kind for kind in CONTAINERS if isinstance(container, kind))


def _is_plain(value: Any) -> bool:
    """Whether it is a value, and not an object that something else works on."""
    values = (int, float, complex, str, bytes, type(None), Tensor, np.ndarray, tuple)
    return isinstance(value, (*values, *CONTAINERS))


@contextlib.contextmanager
def kept(*modules: nn.Module, **options: Any) -> Iterator[None]:
    """A context after which modules are as before; the options are those of `Kept`."""
    before = Kept(*modules, **options)
    try:
        yield
    finally:
        before.restore()


def seed(number: int) -> None:
    """Set what augmentation and dropout draw from."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)


@contextlib.contextmanager
def muted(module: Any) -> Iterator[None]:
    """Nothing is logged, and metrics count nothing."""
    names = [n for n in ("log", "log_dict", "log_exact") if hasattr(module, n)]
    overridden = {n: vars(module)[n] for n in names if n in vars(module)}
    metrics = _outermost_metrics(module)
    for name in names:
        setattr(module, name, log_nothing)
    for path, metric in metrics.items():
        module.set_submodule(path, copy.deepcopy(metric, _detached(metric)))
    try:
        yield
    finally:
        for path, metric in metrics.items():
            module.set_submodule(path, metric)
        for name in names:
            delattr(module, name)
        for name, value in overridden.items():
            setattr(module, name, value)


def _detached(metric: Any) -> dict[int, Tensor]:
    """What `deepcopy` is to take for values that hang on a graph, which it refuses: a
    metric keeps the loss that it was given."""
    held = (value for each in metric.modules() for value in tensors(vars(each)))
    return {id(v): v.detach().clone() for v in held if not v.is_leaf}


def _outermost_metrics(module: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, each in module.named_modules(remove_duplicate=False):
        inside = any(path.startswith(f"{other}.") for other in found)
        if path and not inside and isinstance(each, Metric | MetricCollection):
            found[path] = each
    return found


def log_nothing(*args: Any, **kwargs: Any) -> None:
    """Drop what a module logs."""
