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
from torchmetrics import Metric, MetricCollection

from trainkit.core.batches import tensors


def seed(number: int) -> None:
    """Set what augmentation and dropout draw from."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


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
