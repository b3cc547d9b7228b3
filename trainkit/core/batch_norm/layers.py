"""Finding the BatchNorm layers of a module, freezing them, and replacing them by others
that keep their parameters."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from trainkit.errors import TrainkitError

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


LEAST_CHANNELS_IN_A_GROUP = 4
"""With fewer channels and no pixels, normalising leaves little more than signs."""


def num_groups(num_channels: int, *, at_most: int = 32) -> int:
    """The largest number of equal groups with at least four channels, or 1.

    Wu and He 2018 (arXiv 1803.08494) take 32.

    >>> [num_groups(c) for c in (256, 64, 48, 10, 7, 3)]
    [32, 16, 12, 2, 1, 1]
    """
    fitting = [
        groups
        for groups in range(1, min(at_most, num_channels) + 1)
        if num_channels % groups == 0
        and num_channels // groups >= LEAST_CHANNELS_IN_A_GROUP
    ]
    return max(fitting, default=1)


def to_group_norm(module: nn.Module, *, groups: int = 32) -> dict[str, nn.Module]:
    """Replace each BatchNorm that trains by GroupNorm, which normalises each sample by
    itself.

    A layer at several paths is replaced by one new layer at all of them.

    Args:
        module: the module to change in place.
        groups: the most groups of a layer; see `num_groups`.

    Returns:
        The new layers, by their first path.
    """
    concerned = {id(layer): name for name, layer in layers_to_train(module).items()}
    made: dict[int, nn.Module] = {}
    for path, layer in list(module.named_modules(remove_duplicate=False)):
        if id(layer) in concerned and isinstance(layer, BatchNorm):
            if id(layer) not in made:
                _refuse_own_forward(path, layer)
                made[id(layer)] = _group_norm(layer, groups)
            module.set_submodule(path, made[id(layer)])
    return {concerned[i]: layer for i, layer in made.items()}


def _group_norm(layer: BatchNorm, groups: int) -> nn.Module:
    number, channels = (
        num_groups(layer.num_features, at_most=groups),
        layer.num_features,
    )
    new = nn.GroupNorm(number, channels, eps=layer.eps, affine=layer.affine)
    # The parameters themselves, not copies: an optimizer that holds one keeps it.
    new.weight, new.bias = layer.weight, layer.bias
    return new.train(layer.training)


def _refuse_own_forward(path: str, layer: BatchNorm) -> None:
    """Refuse a layer that does more than BatchNorm, such as timm's with activation, and
    a lazy one."""
    known = (BatchNorm.forward, nn.SyncBatchNorm.forward)
    if type(layer).forward not in known or not layer.num_features:
        raise TrainkitError(
            f"BatchNormGuard: {path} is a {type(layer).__name__}. Its forward() does "
            f"more than BatchNorm's, which replacing it would lose; or it is lazy, and "
            f"gets its channels in a first forward pass: run one batch before fit. Or "
            f"replace it yourself, or use 'momentum', 'recalibrate' or 'freeze'."
        )
