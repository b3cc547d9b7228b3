"""The nets that the tests of exact BatchNorm run, and how each is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.core.tape.nets import (
    Both,
    Bottleneck,
    DenseNet,
    InDict,
    InPlace,
    MobileNet,
    OtherDims,
    ResNet,
    Shuffle,
    Twice,
    UNet,
    plain,
)

SIDE = 8


def frozen() -> nn.Module:
    """With a frozen layer, frozen weights, and others that do not train."""
    net = ResNet(per_stage=1)
    net.bn1.eval()
    first: Any = net.stages[0]
    first.bn1.requires_grad_(False)
    first.conv1.requires_grad_(False)
    first.bn2.weight.requires_grad_(False)
    return net


def zero_gamma() -> nn.Module:
    """The last layer of each block begins with a weight of zero."""
    net = ResNet(Bottleneck, per_stage=1)
    blocks: Any = net.stages
    for block in blocks:
        nn.init.zeros_(block.bn3.weight)
    return net


def no_graph_before() -> nn.Module:
    """All that comes before the second layer is frozen."""
    net: Any = plain()
    net[:4].requires_grad_(False)
    return net


@dataclass(frozen=True)
class Case:
    """A net, how it is called, and what its loss is made of.

    Attributes:
        make: the net.
        call: calls it on rows of images; returns tensors of the same rows.
    """

    make: Callable[[], nn.Module]
    call: Callable[[Any, Tensor], Any] = lambda net, x: [net(x)]


def _both(net: Any, x: Tensor) -> Any:
    return list(net(x, other=x.flip(2) + 1, scale=0.5))


def _dict(net: Any, x: Tensor) -> Any:
    found = net(x)
    return [found["out"], found["all"][0]]


CASES: dict[str, Case] = {
    "resnet18": Case(ResNet),
    "bottleneck": Case(lambda: ResNet(Bottleneck, per_stage=1)),
    "zero_gamma": Case(zero_gamma),
    "unet": Case(UNet),
    "densenet": Case(DenseNet),
    "mobilenet": Case(MobileNet),
    "shufflenet": Case(Shuffle),
    "shuffle_by_index": Case(lambda: Shuffle(by_index=True)),
    "plain": Case(plain),
    "no_affine": Case(lambda: plain(affine=False)),
    "no_momentum": Case(lambda: plain(momentum=None)),
    "no_running": Case(lambda: plain(track_running_stats=False)),
    "nothing": Case(lambda: plain(affine=False, track_running_stats=False)),
    "eps_and_momentum": Case(lambda: plain(eps=0.1, momentum=0.7)),
    "two_in_two_out": Case(Both, _both),
    "twice": Case(Twice),
    "called_twice": Case(
        lambda: ResNet(per_stage=1), lambda net, x: [net(x), net(x * 2)]
    ),
    "other_dims": Case(OtherDims, lambda net, x: [net(x[:, 0].view(-1, 4, 4, 4))]),
    "dict": Case(InDict, _dict),
    "in_place": Case(InPlace),
    "frozen": Case(frozen),
    "no_graph_before": Case(no_graph_before),
    "a_layer": Case(lambda: nn.BatchNorm2d(3)),
}


def made(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """The net of a case, whose layers' weights are unlike each other."""
    torch.manual_seed(seed)
    net = CASES[name].make()
    for layer in net.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.affine:
            if layer.weight.any():
                nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.uniform_(layer.bias, -0.5, 0.5)
    return net.to(dtype)


def images(rows: int = 11, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    """Rows that are unlike each other, so that plain accumulation goes wrong."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, SIDE, SIDE, generator=generator, dtype=torch.float64)
    scale = torch.linspace(0.1, 3, rows, dtype=torch.float64).view(-1, 1, 1, 1)
    return (x * scale + 4 * scale - 4).to(dtype)
