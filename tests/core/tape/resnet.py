"""A ResNet of transformers, from its configuration."""

from __future__ import annotations

from typing import Any

from torch import nn


def resnet(
    *,
    first: int = 64,
    widths: tuple[int, ...] = (256, 512, 1024, 2048),
    depths: tuple[int, ...] = (3, 4, 6, 3),
    num_classes: int = 1000,
    activation: str = "relu",
) -> nn.Module:
    """A ResNet-50, or a smaller one: the model's own layers, one after the other.

    The model itself looks at the shape of its images, which tracing cannot follow.
    """
    from transformers import ResNetConfig, ResNetModel

    config = ResNetConfig(
        embedding_size=first,
        hidden_sizes=list(widths),
        depths=list(depths),
        hidden_act=activation,
    )
    model: Any = ResNetModel(config)
    layers = [layer for stage in model.encoder.stages for layer in stage.layers]
    stem = [model.embedder.embedder, model.embedder.pooler]
    end = [model.pooler, nn.Flatten(), nn.Linear(widths[-1], num_classes)]
    return nn.Sequential(*stem, *layers, *end)
