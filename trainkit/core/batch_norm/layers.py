"""Finding the BatchNorm layers that accumulation concerns."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

Layers = Mapping[str, BatchNorm]
"""Layers by their path in the module."""


def every_layer(module: nn.Module) -> dict[str, BatchNorm]:
    """All BatchNorm layers, lazy and synchronised ones too, that hold statistics,
    whether they follow the data just now or not.

    >>> from torch import nn
    >>> net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.InstanceNorm2d(2))
    >>> list(every_layer(net))
    ['1']
    """
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, BatchNorm) and layer.running_mean is not None
    }


def is_training(layer: BatchNorm) -> bool:
    """Whether a layer normalises by what it sees and follows it: it is neither frozen
    nor in evaluation mode."""
    return layer.training and layer.track_running_stats


def normalising_by_batch(module: nn.Module) -> list[str]:
    """The layers, by name, that normalise by what they see as the module now is.

    Not only those that `is_training`: one whose `track_running_stats` finetuning has
    taken back still does, and one without statistics always does.

    >>> from torch import nn
    >>> net = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2).eval())
    >>> normalising_by_batch(net)
    ['0']
    """
    return [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, BatchNorm)
        and (layer.training or layer.running_mean is None)
    ]


def layers_to_train(module: nn.Module) -> dict[str, BatchNorm]:
    """Those that will train, seen from before training.

    Not those in evaluation mode inside a module that trains; but those that finetuning
    has stopped for a while.
    """
    return {
        name: layer
        for name, layer in every_layer(module).items()
        if layer.training or not module.training
    }


def num_sharing_ranks(layer: BatchNorm) -> int:
    """How many ranks make a layer's statistics together."""
    is_running = dist.is_available() and dist.is_initialized()
    if not isinstance(layer, nn.SyncBatchNorm) or not is_running:
        return 1
    return dist.get_world_size(layer.process_group or dist.group.WORLD)


def momentum_per_micro_batch(momentum: float, num_micro_batches: int) -> float:
    """1 - (1 - m)^(1/N): N updates forget as much as one of the big batch's.

    Each update keeps 1 - m of the running statistics; N of them must keep together
    what one kept.

    >>> m = momentum_per_micro_batch(0.1, 4)
    >>> round((1 - m) ** 4, 12)
    0.9
    """
    if momentum >= 1:
        return momentum
    # 1 - (1 - momentum) ** (1 / n), but exact for the smallest momenta.
    return -math.expm1(math.log1p(-momentum) / num_micro_batches)


def listed(names: list[str], *, at_most: int = 5) -> str:
    """A few names, and how many more there are."""
    shown = ", ".join(names[:at_most])
    more = len(names) - at_most
    return f"{shown} and {more} more" if more > 0 else shown
