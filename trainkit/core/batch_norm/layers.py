"""Finding the BatchNorm layers of a module, and freezing them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

Layers = Mapping[str, BatchNorm]
"""Layers by their path in the module."""


def every_layer(module: nn.Module) -> dict[str, BatchNorm]:
    """All BatchNorm layers with running statistics, lazy and synchronised ones too.

    They are listed whether they update their statistics at present or not.

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
    """Whether a layer updates its statistics: not frozen, not in evaluation mode."""
    return layer.training and layer.track_running_stats


def normalising_by_batch(module: nn.Module) -> list[str]:
    """The names of the layers that at present normalise by each batch's statistics.

    These are more than `is_training` finds: a layer with `track_running_stats` set to
    False still does so, and a layer without statistics always does.

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
    """The layers that will train, as known before training.

    Layers in evaluation mode are left out, unless the whole module is in it. Layers
    whose updates finetuning has stopped for a while are included.
    """
    return {
        name: layer
        for name, layer in every_layer(module).items()
        if layer.training or not module.training
    }


def num_sharing_ranks(layer: BatchNorm) -> int:
    """How many ranks compute a layer's statistics together."""
    is_running = dist.is_available() and dist.is_initialized()
    if not isinstance(layer, nn.SyncBatchNorm) or not is_running:
        return 1
    return dist.get_world_size(layer.process_group or dist.group.WORLD)


def momentum_per_micro_batch(momentum: float, num_micro_batches: int) -> float:
    """1 - (1 - m)^(1/N), with which N updates forget as much as one of the big batch.

    Each update keeps 1 - m of the running statistics. N updates together must keep as
    much as one did.

    >>> m = momentum_per_micro_batch(0.1, 4)
    >>> round((1 - m) ** 4, 12)
    0.9
    """
    if momentum >= 1:
        return momentum
    # 1 - (1 - momentum) ** (1 / n), but exact for the smallest momenta.
    return -math.expm1(math.log1p(-momentum) / num_micro_batches)


def freeze(layer: BatchNorm) -> None:
    """Keep a layer in evaluation mode, even after `train()` on it or a parent."""
    layer.eval()
    layer.train = functools.partial(_stay_frozen, layer)  # type: ignore[method-assign]


def thaw(layer: BatchNorm) -> None:
    """Undo `freeze`; the layer trains again."""
    del layer.train
    layer.train()


def _stay_frozen(layer: BatchNorm, mode: bool = True) -> BatchNorm:
    layer.training = False
    return layer


def listed(names: list[str], *, at_most: int = 5) -> str:
    """A few names, and how many more there are."""
    shown = ", ".join(names[:at_most])
    more = len(names) - at_most
    return f"{shown} and {more} more" if more > 0 else shown
