"""What a forward may do between two layers of BatchNorm."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from tests.zoo.conv_nets import CLASSES, conv, conv_bn, pooled

FOREIGN = nn.Parameter(torch.ones(4, 1, 1, dtype=torch.float64))
GLOBAL: dict[str, Any] = {"is_on": False, "kept": None}
ONE = torch.tensor(1.0, dtype=torch.float64)


class Trap(nn.Module):
    """Two layers of BatchNorm, with something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = conv_bn(3, 4, nn.Tanh()), conv_bn(4, 4, nn.Tanh())
        self.fc = nn.Linear(4, CLASSES)

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Any:
        return self.fc(pooled(self.two(self.between(self.one(x)))))


class Way(Trap):
    """What lies between its layers is given; so are attributes of its own.

    Args:
        between: of the net and the values.
        is_whole: whether it is all of the forward.
        attributes: tensors among them are buffers.
    """

    def __init__(self, between: Any, is_whole: bool, **attributes: Any) -> None:
        super().__init__()
        self.way, self.is_whole = between, is_whole
        self.token = nn.Parameter(torch.rand(1, 4, 8, 8))
        self.weight = nn.Parameter(torch.rand(4, 4))
        for name, value in attributes.items():
            if type(value) is Tensor:
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def between(self, x: Tensor) -> Tensor:
        return self.way(self, x)

    def forward(self, x: Tensor) -> Any:
        return self.way(self, x) if self.is_whole else super().forward(x)


def unchanged(net: Any) -> None:
    """Nothing happens between two batches."""


@dataclass(frozen=True)
class Case:
    """A net, and what is to be seen of its second step.

    Attributes:
        way: what lies between its layers.
        own: makes its attributes.
        change: what happens to it after its first step.
        refused: what the error says, if it is refused.
        limit: how far from the big batch it may be.
        apart: how far chunks that are normalised apart are, at least.
        is_whole: whether the way is all of the forward.
        adapt: changes the net that is made.
    """

    way: Callable[[Any, Tensor], Any] = lambda net, x: x
    own: Callable[[], dict[str, Any]] = dict
    change: Callable[[Any], Any] = unchanged
    refused: str = ""
    limit: float = 1e-12
    apart: float = 0.05
    is_whole: bool = False
    adapt: Callable[[Any], Any] = unchanged

    def make(self) -> Any:
        torch.manual_seed(0)
        net = Way(self.way, self.is_whole, **self.own())
        self.adapt(net)
        return net.double()


def after(act: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Tensor]:
    """A way that does something, and gives back what it got."""

    def way(net: Any, x: Tensor) -> Tensor:
        act(net, x)
        return x

    return way


def put(**values: Any) -> Callable[[Any], None]:
    """A change that sets attributes."""

    def change(net: Any) -> None:
        for name, value in values.items():
            setattr(net, name, value)

    return change


def turn_on(net: Any) -> None:
    GLOBAL["is_on"] = True


def rows(x: Tensor) -> Any:
    return x.shape[0]


# ---- ways of several lines -----------------------------------------------------------


def written(net: Any, x: Tensor) -> Tensor:
    filled = torch.zeros_like(x)
    filled[:, :2] = x[:, :2]
    return filled + x


def twice_as(net: Any, x: Tensor) -> Tensor:
    found = torch.empty_like(x)
    torch.mul(x.detach(), 2, out=found)
    return found + x


def view_written(net: Any, x: Tensor) -> Tensor:
    x = x.sin()
    x[:, :2].mul_(3)
    return net.one[1](x) + x


def over_a_layer(net: Any, x: Tensor) -> Tensor:
    x = x.sin()
    view = x[:, :2]
    y = net.one[1](x * 1)
    x.mul_(3)
    return torch.cat([view, x[:, 2:]], 1) + y


def rewritten(net: Any, x: Tensor) -> Tensor:
    """What a layer gets is changed in place before its result is used."""
    h = net.one[0](x)
    n = net.one[1](h + 0)
    h.mul_(2)
    m = net.two[1](net.two[0](h))
    return net.fc(pooled(torch.tanh(n) * m))


def layer_in_checkpoint(net: Any, x: Tensor) -> Tensor:
    return net.fc(pooled(checkpoint(net.two, net.one(x), use_reentrant=False)))


def without_gradients(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.mean(1, keepdim=True) + 2
    return x * scale


def by_a_teacher(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        other = net.teacher(x)
    return x * (other + 2)


@torch.no_grad()
def scaled(net: Any, x: Tensor) -> Tensor:
    return net.one[1](x * 2).sigmoid()


def in_half(net: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = F.conv2d(x.float(), net.two[0].weight.float(), padding=1)
    return x + y.to(x.dtype)


class Through(torch.autograd.Function):
    """Whose gradient is not that of its operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore
        return 3 * gradient


class Norming(torch.autograd.Function):
    """Which normalises by the rows that it gets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore
        return gradient


class Calling(torch.autograd.Function):
    """Which is given a module."""

    @staticmethod
    def forward(ctx: Any, body: nn.Module, x: Tensor) -> Tensor:
        return body(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore
        return None, gradient


class Told(torch.autograd.Function):
    """What it does with gradients is given."""

    @staticmethod
    def forward(ctx: Any, act: Any, x: Tensor) -> Tensor:
        ctx.act = act[0]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore
        return None, ctx.act(gradient)


def normed_backward(net: Any, x: Tensor) -> Tensor:
    return Told.apply([lambda gradient: gradient / gradient.norm()], x)


def straight_through(net: Any, x: Tensor) -> Tensor:
    """Its values do not see other rows, its gradient does."""
    other = x.flip(0)
    return x + other - other.detach()


class Reading(torch.autograd.Function):
    """Keeps a number that it reads from values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        GLOBAL["read"] = float(x.abs().mean())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore
        return gradient


def reading(net: Any, x: Tensor) -> Tensor:
    return Reading.apply(x) + GLOBAL["read"] * x.sin()


def on_shape(net: Any, x: Tensor) -> Tensor:
    if x.dim() != 4 or x.ndim != 4 or len(x.shape) != 4 or x.is_cuda:
        raise ValueError(x.shape)
    return x + torch.zeros(rows(x), 1, 1, 1, dtype=x.dtype, device=x.device)


def summing(net: Any, x: Tensor) -> Tensor:
    total = torch.zeros(4, 1, 1, dtype=torch.float64)
    total += x.detach().square().sum((0, 2, 3)).view(4, 1, 1) * 0 + 1
    return x * total


def filled(net: Any, x: Tensor) -> Tensor:
    table = torch.zeros(2, 4, 1, 1)
    row = table[0]
    row += x.detach()[0, :, :1, :1] * 0 + 1
    return x * table[0]


ONE_AND_TWO = itertools.cycle([1, 2])


def other_shape(net: Any, x: Tensor) -> Tensor:
    """Each time it returns another number of columns."""
    return net.fc(pooled(net.one(x)))[:, : next(ONE_AND_TWO)]


def more_outputs(net: Any, x: Tensor) -> list[Tensor]:
    """Each time it returns another number of tensors."""
    found = net.fc(pooled(net.one(x)))
    return [found * number for number in range(next(ONE_AND_TWO))]


def spectrum(net: Any, x: Tensor) -> Tensor:
    z = torch.fft.rfft2(x)
    return torch.fft.irfft2(z * net.one[1](z.abs()).tanh())


def cached(net: Any, x: Tensor) -> Tensor:
    """Makes a table once."""
    if GLOBAL["is_on"] and net.table is None:
        net.table = torch.arange(8.0)
    return x if net.table is None else x * net.table


def overwriting(net: Any, x: Tensor) -> Tensor:
    y = x + 1
    return net.one[1](x) + (y.mul_(2) if GLOBAL["is_on"] else y * 2)


class Drops(nn.Module):
    """Layers and functions that draw for each row."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Dropout(0.3), nn.Dropout2d(0.3, True), nn.AlphaDropout(0.2)
        self.layers = nn.Sequential(*layers, nn.RReLU())

    def forward(self, x: Tensor) -> Tensor:
        half = torch.bernoulli(torch.full_like(x, 0.5))
        return self.layers(x * 1) + half * torch.empty_like(x).uniform_()


class Layer(nn.BatchNorm2d):
    """With a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class Lora(nn.Module):
    """A convolution that does not train, and a small one beside it that does."""

    def __init__(self, base: nn.Conv2d) -> None:
        super().__init__()
        self.base = copy.deepcopy(base).requires_grad_(False)
        self.down, self.up = conv(4, 2, 1), conv(2, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def with_lora(net: Any) -> None:
    net.two[0] = Lora(net.two[0])
    net.one.requires_grad_(False)


def with_weight_norm(net: Any) -> None:
    parametrizations.weight_norm(net.two[0])
    parametrizations.weight_norm(net.fc)


def with_parametrized_layer(net: Any) -> None:
    """A weight of a BatchNorm that is made of another."""
    parametrize.register_parametrization(net.two[1], "weight", nn.Softplus())


def with_tied_weights(net: Any) -> None:
    net.two[1].weight, net.fc = net.one[1].weight, nn.Linear(4, 4)
    net.two[1].bias = net.fc.bias


def with_norms(net: Any) -> None:
    norms = nn.InstanceNorm2d(4, affine=True), nn.GroupNorm(2, 4)
    net.part = nn.Sequential(*norms, nn.LayerNorm([4, 8, 8]))


def hook(path: str, kind: str = "forward") -> Callable[[Any], None]:
    """A change: a hook that doubles what comes out, or its gradient."""

    def change(net: Any) -> None:
        module = net.get_submodule(path)
        if kind == "forward":
            module.register_forward_hook(lambda m, a, out: 2 * out)
        else:
            module.register_full_backward_hook(lambda m, a, out: (2 * a[0],))

    return change


def refused(said: str, way: Any, **options: Any) -> Case:
    return Case(way, refused=said, **options)
