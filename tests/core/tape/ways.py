"""What a forward may do between two layers of BatchNorm, and be right."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
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


def hook(path: str, kind: str = "forward") -> Callable[[Any], None]:
    """A change: a hook that doubles what comes out, or its gradient."""

    def change(net: Any) -> None:
        module = net.get_submodule(path)
        if kind == "forward":
            module.register_forward_hook(lambda m, a, out: 2 * out)
        else:
            module.register_full_backward_hook(lambda m, a, out: (2 * a[0],))

    return change


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


def on_shape(net: Any, x: Tensor) -> Tensor:
    if x.dim() != 4 or x.ndim != 4 or len(x.shape) != 4 or x.is_cuda:
        raise ValueError(x.shape)
    return x + torch.zeros(rows(x), 1, 1, 1, dtype=x.dtype, device=x.device)


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


# ---- what is right -------------------------------------------------------------------

RIGHT: dict[str, Case] = {
    # operations
    "mask": Case(lambda net, x: x.masked_fill(x > 0, 0.5)),
    "put": Case(lambda net, x: x.clone().index_put_((x > 0,), torch.tensor(0.5).to(x))),
    "foreign": Case(lambda net, x: x * FOREIGN),
    "turned": Case(lambda net, x: (x.transpose(0, 1) * 2).transpose(0, 1)),
    "layer_norm": Case(lambda net, x: F.layer_norm(x, x.shape[1:])),
    "own_mean": Case(
        lambda net, x: x + x.mean((1, 2, 3), True) / (x > 0).sum((1, 2, 3), True)
    ),
    "gather": Case(lambda net, x: x.gather(1, x.argsort(1))),
    "one_hot": Case(lambda net, x: x * F.one_hot(x.argmax(1), 4).movedim(3, 1)),
    "unfold": Case(lambda net, x: F.fold(F.unfold(x, 3, padding=1), 8, 3, padding=1)),
    "resized": Case(lambda net, x: F.interpolate(F.max_pool2d(x, 2), size=x.shape[2:])),
    "copy": Case(lambda net, x: torch.empty_like(x).copy_(x)),
    "out": Case(twice_as),
    "written": Case(written),
    "view_written": Case(view_written),
    "rewritten": Case(rewritten, is_whole=True),
    "zeros": Case(
        lambda net, x: torch.cat([x[:, 1:], x.new_zeros(rows(x), 1, 8, 8)], 1)
    ),
    "expand": Case(lambda net, x: x + net.token.expand(rows(x), -1, -1, -1)),
    "repeat": Case(lambda net, x: x + net.token.repeat(rows(x), 1, 1, 1)),
    "flat_rows": Case(lambda net, x: x.view(-1, 8).tanh().view(rows(x), 4, 8, 8)),
    "two_views": Case(
        lambda net, x: torch.add(*net.one[1](torch.cat([x, x.flip(2)])).chunk(2))
    ),
    "einsum": Case(lambda net, x: torch.einsum("bchw,cd->bdhw", x, net.weight)),
    "on_shape": Case(on_shape),
    "requires_grad": Case(lambda net, x: x.sin() if x.requires_grad else x),
    "to": Case(lambda net, x: x * net.token.to(x) + x.new_ones(4, 1, 1)),
    "complex": Case(spectrum),
    "functional": Case(lambda net, x: F.batch_norm(x, None, None, training=True)),
    "layer_in_front": Case(
        lambda net, x: net.fc(pooled(net.two(net.one(x - x.mean(1, keepdim=True))))),
        is_whole=True,
    ),
    # gradients and modes
    "no_grad": Case(without_gradients),
    "teacher": Case(by_a_teacher, lambda: {"teacher": conv_bn(4, 4, nn.Tanh())}),
    "decorated": Case(lambda net, x: x * scaled(net, x)),
    # Half precision within is not the big batch's.
    "autocast": Case(in_half, limit=1e-3),
    "function": Case(lambda net, x: Through.apply(x)),
    "detached": Case(lambda net, x: x * x.detach().mean(1, keepdim=True) + x.data),
    "nested_gradients": Case(lambda net, x: x * torch.func.grad(torch.sin)(ONE)),
    "mode": Case(lambda net, x: x.sin() if torch.is_grad_enabled() else x),
    # what is drawn once
    "python": Case(lambda net, x: x * 3 if random.random() < 0.5 else x.sin()),
    "numpy": Case(lambda net, x: x * float(np.random.rand())),
    "fixed": Case(lambda net, x: x * torch.rand(1, 4, 1, 1)),
    "own_generator": Case(
        lambda net, x: x * (torch.rand(1, 4, 1, 1, generator=net.generator) + 0.5),
        lambda: {"generator": None},
    ),
    "weight_noise": Case(
        lambda net, x: F.conv2d(
            x, F.dropout(net.two[0].weight, 0.5) + torch.rand(4, 4, 3, 3), padding=1
        )
    ),
    # state
    "own_weight": Case(
        lambda net, x: x * net.scale + net.shift + torch.arange(4).view(1, 4, 1, 1),
        lambda: {
            "scale": nn.Parameter(torch.rand(1, 4, 1, 1) + 0.5),
            "shift": torch.rand(1, 4, 1, 1),
        },
    ),
    "counting": Case(
        after(lambda net, x: net.calls.add_(1)), lambda: {"calls": torch.zeros(())}
    ),
    "average_of_weights": Case(
        after(lambda net, x: net.mean.add_(net.weight.detach().mean())),
        lambda: {"mean": torch.zeros(())},
    ),
    "all_weights": Case(
        lambda net, x: x * sum(p.square().sum() for p in net.parameters())
    ),
    "by_a_part": Case(lambda net, x: x * torch.ones(4, 1, 1).add_(1)),
    # layers
    "own_forward": Case(adapt=lambda net: net.one.__setitem__(1, Layer(4))),
    "lora": Case(adapt=with_lora),
    "weight_norm": Case(adapt=with_weight_norm),
    "parametrized": Case(adapt=with_parametrized_layer),
    "tied": Case(adapt=with_tied_weights),
    # Most of it does not see other rows.
    "other_norms": Case(lambda net, x: net.part(x), adapt=with_norms, apart=0.0),
    # what changes between two batches: each call is written down anew
    "function_replaced": Case(
        lambda net, x: net.act(x * 2), lambda: {"act": torch.sin}, put(act=torch.cos)
    ),
    "buffer_filled": Case(
        lambda net, x: x * (2 - net.buffer),
        lambda: {"buffer": ONE.clone()},
        lambda net: net.buffer.fill_(0.2),
    ),
    "buffer_asked": Case(
        lambda net, x: x.sin() if net.buffer < 0.7 else x,
        lambda: {"buffer": ONE.clone()},
        lambda net: net.buffer.fill_(0.2),
    ),
    "float_at_first": Case(
        lambda net, x: x @ net.buffer,
        lambda: {"buffer": torch.eye(8)},
        lambda net: net.float(),
        limit=1e-5,
    ),
    "table_later": Case(cached, lambda: {"table": None}, turn_on),
    "writes_later": Case(overwriting, change=turn_on),
    "hook_of_layer": Case(change=hook("one.1")),
}
