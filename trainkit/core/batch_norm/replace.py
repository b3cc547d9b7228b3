"""Replacing BatchNorm layers by others that keep their parameters."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from trainkit.core.batch_norm.layers import BatchNorm, layers_to_train
from trainkit.errors import TrainkitError

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
                _refuse_lazy(path, layer)
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
    """Refuse a layer that does more than BatchNorm, such as timm's with activation."""
    known = (BatchNorm.forward, nn.SyncBatchNorm.forward)
    if type(layer).forward not in known:
        raise TrainkitError(
            f"BatchNormGuard: {path} is a {type(layer).__name__}. Its forward() does "
            f"more than BatchNorm's, which replacing it would lose. Replace it "
            f"yourself, or use 'momentum', 'recalibrate' or 'freeze'."
        )


def _refuse_lazy(path: str, layer: BatchNorm) -> None:
    tensors: list[torch.Tensor | None] = [layer.weight, layer.running_mean]
    if layer.num_features == 0 or any(
        isinstance(t, UninitializedParameter) for t in tensors
    ):
        raise TrainkitError(
            f"BatchNormGuard: {path} is lazy ({type(layer).__name__}) and does not "
            f"know its channels yet, so it cannot be replaced. Run one batch through "
            f"the model before fit, or make the layer with its number of channels."
        )
