"""Running a module's training step aside, so that nothing of it is left behind."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torchmetrics import Metric, MetricCollection

from trainkit.core.batch_norm.layers import BatchNorm


def seed(number: int) -> None:
    """Set what augmentation and dropout draw from."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


@contextlib.contextmanager
def other_buffers_kept(module: Any, layers: dict[str, BatchNorm]) -> Iterator[None]:
    """Queues, centres, codebooks: what a forward pass in training moves."""
    concerned = set(layers.values())
    kept = [
        (each, name, buffer, buffer.clone())
        for each in module.modules()
        if each not in concerned
        for name, buffer in each.named_buffers(recurse=False)
        if not is_lazy(buffer)
    ]
    try:
        yield
    finally:
        for each, name, buffer, copied in kept:
            buffer.copy_(copied)
            setattr(each, name, buffer)


@contextlib.contextmanager
def muted(module: Any) -> Iterator[None]:
    """Nothing is logged, and metrics count nothing."""
    names = [n for n in ("log", "log_dict", "log_exact") if hasattr(module, n)]
    overridden = {n: vars(module)[n] for n in names if n in vars(module)}
    metrics = _outermost_metrics(module)
    for name in names:
        setattr(module, name, _say_nothing)
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
    found: dict[int, Tensor] = {}

    def note(value: Any) -> None:
        if isinstance(value, Tensor):
            if not value.is_leaf:
                found[id(value)] = value.detach().clone()
        elif isinstance(value, list | tuple):
            for each in value:
                note(each)
        elif isinstance(value, dict):
            note(list(value.values()))

    for each in metric.modules():
        note(vars(each))
    return found


def _outermost_metrics(module: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, each in module.named_modules(remove_duplicate=False):
        inside = any(path.startswith(f"{other}.") for other in found)
        if path and not inside and isinstance(each, Metric | MetricCollection):
            found[path] = each
    return found


def _say_nothing(*args: Any, **kwargs: Any) -> None:
    return None
