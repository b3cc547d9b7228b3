"""Steps that will not count: what they change is put back, and nobody hears them.

The live module is put back for three: a loader batch that runs again after memory ran
out, sizes that are timed, and statistics of BatchNorm that are computed anew. Whatever
can run on a copy does so.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import lightning.pytorch  # noqa: F401  # it sets the level of its logger
import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainkit.core.generators import generator_keeper, read_states, write_states
from trainkit.lit._compat import replaced

FRAMEWORK = frozenset(vars(LightningModule())) | {"_defaults"}
"""What torch, Lightning and torchmetrics keep in a module."""

DEPTH = 3
"""A module's attributes, a container in one of them, and one within that."""

MOST_BYTES, MOST_ENTRIES = 2**26, 1000
"""Larger arrays, and what larger containers hold, stay as they are."""


class Kept:
    """The state of a module, as it is when this is made.

    That is its buffers, and its attributes: tensors and arrays by value, the entries of
    lists and the like, two deep, random generators. What is deeper, or in objects that
    are no modules, is left as it is.

    Args:
        module: whose state.
        tensors: whether their values are kept. In a copy that is thrown away they need
            not be, and would take memory.
        device: keep the global random generators as well, this device's among them.
        generators: whether to keep the random generators that the module holds.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        tensors: bool = True,
        device: torch.device | None = None,
        generators: bool = True,
    ) -> None:
        self._tensors, self._generators, self._device = tensors, generators, device
        self._put_back: list[Callable[[], None]] = []
        self._seen: dict[int, Any] = {}
        for each in module.modules():
            self._keep(each._buffers, DEPTH)
            self._keep_named(vars(each), FRAMEWORK, DEPTH)
        self._random = None if device is None else read_states(device)

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *_: Any) -> None:
        self.restore()

    def restore(self) -> None:
        """Put everything back; may be called again."""
        with torch.no_grad():
            for put_back in self._put_back:
                put_back()
        if self._random is not None:
            assert self._device is not None
            write_states(self._random, self._device)

    def _keep(self, value: Any, depth: int) -> None:
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            # A list of outputs grows with each batch; its tensors do not change.
            if depth == DEPTH - 1 and self._tensors:
                self._keep_tensor(value)
        elif isinstance(value, np.ndarray):
            if value.flags.writeable and value.nbytes < MOST_BYTES:
                kept = value.copy()
                self._put_back.append(lambda: np.copyto(value, kept))
        elif isinstance(value, dict) and depth:
            self._keep_named(value, (), depth)
        elif isinstance(value, list | deque | set) and depth:
            self._keep_entries(value, depth)
        elif self._generators and (put_back := generator_keeper(value)):
            self._put_back.append(put_back)

    def _keep_named(self, held: Any, without: Collection[Any], depth: int) -> None:
        kept = {name: each for name, each in held.items() if name not in without}

        def put_back() -> None:
            for name in [n for n in held if n not in kept and n not in without]:
                del held[name]
            changed = [n for n, v in kept.items() if n not in held or held[n] is not v]
            if changed:  # a frozen dict refuses to be written
                for name in changed:  # a Counter's update() would add
                    held[name] = kept[name]

        self._put_back.append(put_back)
        for each in kept.values() if len(kept) < MOST_ENTRIES else ():
            self._keep(each, depth - 1)

    def _keep_entries(self, held: Any, depth: int) -> None:
        kept, put = list(held), held.update if isinstance(held, set) else held.extend

        def put_back() -> None:
            held.clear()
            put(kept)

        self._put_back.append(put_back)
        for each in kept if len(kept) < MOST_ENTRIES else ():
            self._keep(each, depth - 1)

    def _keep_tensor(self, tensor: Tensor) -> None:
        if is_lazy(tensor) or tensor.is_meta:
            return
        kept = tensor.detach().clone()

        def put_back() -> None:
            is_like = tensor.is_nested or tensor.shape == kept.shape
            if tensor.dtype == kept.dtype and is_like:
                tensor.detach().copy_(kept)  # in place: others may be views of it
            else:  # cast, or resized
                tensor.data = kept.clone()

        self._put_back.append(put_back)


@contextlib.contextmanager
def muted(module: Any) -> Iterator[None]:
    """Nothing is logged."""
    names = [n for n in ("log", "log_dict", "log_exact") if hasattr(module, n)]
    with replaced(module, **dict.fromkeys(names, _log_nothing)):
        yield


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    pass


ADVICE = (
    r".*treespec, LeafSpec.*",
    r".*does not have many workers.*",
    r".*LearningRateMonitor.* no learning rate schedulers.*",
    r".*Checkpoint directory .* exists and is not empty.*",  # when resuming
)
FOR_A_TRAINING = (
    r".*max_epochs. was not set.*",
    r"You defined a .validation_step. but have no .*",
    r".*smaller than the logging interval.*",
    r".*callbacks used to create the checkpoint.*",  # which an evaluation leaves out
    r".*srun. command is available on your.*",
)


LIGHTNINGS = ("lightning.pytorch", "pytorch_lightning", "lightning.fabric")


@contextlib.contextmanager
def logged_from(level: int) -> Iterator[None]:
    """Lightning's loggers say nothing below a level.

    To set one takes long, so those that have it, or a higher one, are left alone.
    """
    loggers = map(logging.getLogger, LIGHTNINGS)
    lower = [(each, each.level) for each in loggers if each.level < level]
    try:
        for each, _ in lower:
            each.setLevel(level)
        yield
    finally:
        for each, before in lower:
            each.setLevel(before)


@contextlib.contextmanager
def without_advice(known: Sequence[str] = ADVICE + FOR_A_TRAINING) -> Iterator[None]:
    """Lightning does not give this advice; by default, what is meant for a training."""
    with logged_from(logging.WARNING), warnings.catch_warnings():
        for each in known:
            warnings.filterwarnings("ignore", each)
        yield
