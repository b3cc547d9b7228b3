"""A deep net with every kind of BatchNorm, and the statistics of one big batch."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.core.batch_norm.layers import every_layer

ROWS = 23


class Block(nn.Module):
    """A residual block, as torchvision's ResNets have them."""

    def __init__(self, channels: int, wider: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, wider, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(wider)
        self.conv2 = nn.Conv2d(wider, wider, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(wider, momentum=None)
        self.downsample = nn.Sequential(
            nn.Conv2d(channels, wider, 1, bias=False), nn.BatchNorm2d(wider)
        )

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(inner + self.downsample(x))


class ResNet(nn.Module):
    """Small: of (N, 1, 6, 6) into three classes, BatchNorm in 1, 2 and 3 dimensions."""

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.stem = nn.Conv3d(1, 4, (1, 3, 3), padding=(0, 1, 1))
            self.stem_bn = nn.BatchNorm3d(4)
            self.layers = nn.Sequential(Block(4, 6), Block(6, 8))
            self.line = nn.Conv1d(8, 8, 3)
            self.line_bn = nn.BatchNorm1d(8, affine=False)
            self.head = nn.Linear(8, 8)
            self.head_bn = nn.BatchNorm1d(8, momentum=0.3, eps=1e-3)
            self.last = nn.Linear(8, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem_bn(self.stem(x.unsqueeze(2)))).squeeze(2)
        x = self.layers(x).flatten(2)
        x = torch.tanh(self.line_bn(self.line(x))).mean(2)
        return self.last(torch.tanh(self.head_bn(self.head(x))))


def images(rows: int = ROWS, *, seed: int = 1) -> Tensor:
    """Rows that differ much, so that micro-batches do."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 1, 6, 6, generator=generator, dtype=torch.float64)
    return x * torch.linspace(0.3, 3, rows, dtype=torch.float64).view(-1, 1, 1, 1) + 1


def ragged(x: Tensor, sizes: Iterable[int] = (4, 1, 7, 2, 9)) -> list[Tensor]:
    parts = list(torch.split(x, list(sizes)))
    assert sum(map(len, parts)) == len(x)
    return parts


def statistics(net: nn.Module) -> dict[str, Tensor]:
    """The running statistics of every layer."""
    return {
        f"{name}.{key}": getattr(layer, key).clone()
        for name, layer in every_layer(net).items()
        for key in ("running_mean", "running_var")
    }


def of_big_batch(net: nn.Module, x: Any) -> dict[str, Tensor]:
    """The reference: what one forward pass over all rows leaves with momentum=1."""
    reference = copy.deepcopy(net).train()
    for layer in every_layer(reference).values():
        layer.momentum = 1.0
    with torch.no_grad():
        reference(x)
    return statistics(reference)


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == wanted.keys()
    return {k: float((found[k] - wanted[k]).abs().max()) for k in wanted}


def furthest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return max(distance(found, wanted).values())


def momenta(net: nn.Module) -> dict[str, float | None]:
    return {name: layer.momentum for name, layer in every_layer(net).items()}
