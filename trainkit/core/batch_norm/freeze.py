"""Freezing a BatchNorm layer so that `train()` does not undo it."""

from __future__ import annotations

import functools

from trainkit.core.batch_norm.layers import BatchNorm


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
