"""The nets that the tests of exact BatchNorm run, how each is called, and the step that
they compare with the big batch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.conv_nets import (
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
from trainkit import exact_batch_norm

EXACT = 1e-12
"""How far a gradient may be from the big batch's, in float64."""

NAIVE = 0.1
"""How far plain accumulation is, at least."""


def off_by(found: Any, wanted: Any) -> float:
    """The relative distance of two lists of tensors."""
    lists = [[each.detach().double() for each in given] for given in (found, wanted)]
    apart = sum(float((a - b).square().sum()) for a, b in zip(*lists, strict=True))
    whole = sum(float(b.square().sum()) for b in lists[1])
    return (apart / whole if apart else 0.0) ** 0.5


def gradients(net: nn.Module) -> list[Tensor]:
    pairs = [(p, p.grad) for p in net.parameters()]
    return [torch.zeros_like(p) if grad is None else grad.clone() for p, grad in pairs]


def state(net: nn.Module) -> list[Tensor]:
    return [each.clone() for each in net.buffers()]


def summed(outputs: Sequence[Tensor]) -> Tensor:
    """A loss that is a sum over rows, and not symmetric."""
    total = torch.zeros((), dtype=outputs[0].dtype)
    for number, out in enumerate(outputs):
        flat = out.flatten(1)
        target = torch.linspace(-1, 2, flat.shape[1], dtype=out.dtype)
        total = total + ((flat - target).square() / (1 + number)).sum()
    return total / 1000


def any_loss(outputs: Sequence[Tensor]) -> Tensor:
    """A loss in which each row sees all others."""
    total = torch.zeros((), dtype=outputs[0].dtype)
    for out in outputs:
        z = torch.nn.functional.normalize(out.flatten(1), dim=1)
        total = total + (3 * z @ z.T).logsumexp(1).mean() + out.std(0).sum()
    return total


@dataclass
class Found:
    """What one step gives.

    Attributes:
        loss: of the whole batch.
        gradients: of the parameters, then of the input.
        state: the buffers.
        net: after it.
    """

    loss: float
    gradients: list[Tensor]
    state: list[Tensor]
    net: nn.Module


def step(
    name: str, rows: int, size: int | None = None, dtype: torch.dtype = torch.float64
) -> Found:
    """One step of a case, with the big batch or in chunks of a size."""
    own, x = made(name, dtype), images(rows, dtype).requires_grad_()
    keys = list(own.state_dict())
    net = own if size is None else exact_batch_norm(own, size=size)
    assert list(net.state_dict()) == keys
    total = any_loss(CASES[name].call(net, x))
    total.backward()
    if size is not None:
        net.remove()  # type: ignore[operator]
        assert all("forward" not in vars(each) for each in own.modules())
    assert x.grad is not None
    return Found(total.item(), [*gradients(own), x.grad], state(own), own)


def apart(name: str, rows: int, size: int) -> list[Tensor]:
    """The gradients where each chunk is normalised by itself."""
    net, x = made(name), images(rows).requires_grad_()
    parts = [CASES[name].call(net, part) for part in x.split(size)]
    any_loss([torch.cat(each) for each in zip(*parts, strict=True)]).backward()
    assert x.grad is not None
    return [*gradients(net), x.grad]


def check_same(found: Found, wanted: Found, at_most: float = EXACT) -> None:
    """Loss, gradients and buffers are the big batch's."""
    assert abs(found.loss - wanted.loss) <= at_most * abs(wanted.loss)
    assert off_by(found.gradients, wanted.gradients) <= at_most
    for one, other in zip(found.state, wanted.state, strict=True):
        assert one.dtype == other.dtype
        assert off_by([one], [other]) <= at_most


SIDE = 8


def small() -> ResNet:
    return ResNet(per_stage=1)


def frozen() -> nn.Module:
    """With a frozen layer, frozen weights, and others that do not train."""
    net = small()
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
    "two_in_two_out": Case(
        Both, lambda net, x: list(net(x, other=x.flip(2) + 1, scale=0.5))
    ),
    "twice": Case(Twice),
    "called_twice": Case(small, lambda net, x: [net(x), net(x * 2)]),
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
