"""Running a module's training step aside, so that nothing of it is left behind."""

from __future__ import annotations

import contextlib
import copy
import logging
import random
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch  # noqa: F401  # it sets the level of its logger
import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from trainkit.core.batches import tensors

UNLIKELY = 748_151_933
"""A seed that no training has, so that what is drawn unseen is drawn otherwise."""


def seed(number: int) -> None:
    """Set what augmentation and dropout draw from."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


ADVICE = (
    r".*treespec, LeafSpec.*",
    r".*does not have many workers.*",
    r".*max_epochs. was not set.*",
    r".*smaller than the logging interval.*",
)


@contextlib.contextmanager
def without_advice() -> Iterator[None]:
    """Lightning does not give the advice that is meant for a training."""
    names = "lightning.pytorch", "pytorch_lightning"
    loggers = [(each, each.level) for each in map(logging.getLogger, names)]
    with warnings.catch_warnings():
        for known in ADVICE:
            warnings.filterwarnings("ignore", known)
        for logger, level in loggers:
            logger.setLevel(max(level, logging.WARNING))
        try:
            yield
        finally:
            for logger, level in loggers:
                logger.setLevel(level)


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
