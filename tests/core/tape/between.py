"""What a forward may do between two layers: right, refused, or never silent."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.core.tape.traps import Trap

FOREIGN = nn.Parameter(torch.ones(4, 1, 1, dtype=torch.float64))
KEPT: list[Tensor] = []
Way = Callable[[Any, Tensor], Tensor]


class Between(Trap):
    """What lies between its layers is given.

    Args:
        way: of the net and the values.
    """

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way, self.listed, self.named = way, [], {}
        self.token = nn.Parameter(torch.rand(1, 4, 8, 8))
        self.weight = nn.Parameter(torch.rand(4, 4))
        self.register_buffer("average", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def between(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def made(way: Way) -> Any:
    torch.manual_seed(0)
    return Between(way).double()


def after(act: Callable[[Any, Tensor], Any]) -> Way:
    """A way that does something, and gives back what it got."""

    def way(net: Any, x: Tensor) -> Tensor:
        act(net, x)
        return x

    return way


def zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[0], 1, 8, 8, dtype=x.dtype)


def written(x: Tensor) -> Tensor:
    filled = torch.zeros_like(x)
    filled[:, :2] = x[:, :2]
    return filled + x


def twice_as(x: Tensor) -> Tensor:
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


def gram(x: Tensor) -> Tensor:
    return x.flatten(1) @ x.flatten(1).T


def rows(x: Tensor) -> Any:
    return x.shape[0]


def mean_of(x: Tensor) -> Tensor:
    return x.sum((1, 2, 3), keepdim=True) / (x > 0).sum((1, 2, 3), keepdim=True)


RIGHT: dict[str, Way] = {
    "mask": lambda net, x: x.masked_fill(x > 0, 0.5),
    "put": lambda net, x: x.clone().index_put_((x > 0,), torch.tensor(0.5).to(x)),
    "foreign": lambda net, x: x * FOREIGN,
    "turned": lambda net, x: (x.transpose(0, 1) * 2).transpose(0, 1),
    "layer_norm": lambda net, x: F.layer_norm(x, x.shape[1:]),
    "own_mean": lambda net, x: x + mean_of(x),
    "gather": lambda net, x: x.gather(1, x.argsort(1)),
    "one_hot": lambda net, x: x * F.one_hot(x.argmax(1), 4).movedim(3, 1),
    "unfold": lambda net, x: F.fold(F.unfold(x, 3, padding=1), (8, 8), 3, padding=1),
    "resized": lambda net, x: F.interpolate(F.max_pool2d(x, 2), size=x.shape[2:]),
    "copy": lambda net, x: torch.empty_like(x).copy_(x),
    "out": lambda net, x: twice_as(x),
    "written": lambda net, x: written(x),
    "view_written": view_written,
    "zeros": lambda net, x: torch.cat([x[:, 1:], zeros(x)], 1),
    "expand": lambda net, x: x + net.token.expand(rows(x), -1, -1, -1),
    "repeat": lambda net, x: x + net.token.repeat(rows(x), 1, 1, 1),
    "flat_rows": lambda net, x: x.view(-1, 8).tanh().view(rows(x), 4, 8, 8),
    "einsum": lambda net, x: torch.einsum("bchw,cd->bdhw", x, net.weight),
    "requires_grad": lambda net, x: x.sin() if x.requires_grad else x,
    "left": after(lambda net, x: setattr(net, "aux", x.square())),
    "listed": after(lambda net, x: net.listed.append(x.square())),
    "named": after(lambda net, x: net.named.update(a=x * 2)),
    "batch_norm": lambda net, x: torch.batch_norm(
        x, None, None, None, None, True, 0.1, 1e-5, False
    ),
    "weight_noise": lambda net, x: F.conv2d(
        x, F.dropout(net.two[0].weight, 0.5) + torch.rand(4, 4, 3, 3), padding=1
    ),
    "to": lambda net, x: x * net.token.to(x) + x.new_ones(4, 1, 1),
    "average_of_weights": after(
        lambda net, x: net.average.add_(net.weight.detach().mean())
    ),
}

REFUSED: dict[str, tuple[str, Way]] = {
    "softmax": ("see each other", lambda net, x: x.softmax(0)),
    "flip": ("see each other", lambda net, x: x + x.flip(0)),
    "cumsum": ("see each other", lambda net, x: x.cumsum(0)),
    "sort": ("see each other", lambda net, x: x.sort(0)[0]),
    "mean": ("one value of all rows", lambda net, x: x - x.mean(0)),
    "norm": ("one value of all rows", lambda net, x: x / x.norm()),
    "largest": ("one value of all rows", lambda net, x: x / x.amax()),
    "first": ("one value of all rows", lambda net, x: x - x[:1]),
    "einsum": ("all rows", lambda net, x: x + torch.einsum("bchw,bchw->chw", x, x)),
    "gram": ("see each other", lambda net, x: x * gram(x).mean()),
    "by_rows": ("number of rows", lambda net, x: x / rows(x)),
    "by_a_share": ("number of rows", lambda net, x: x * (1.0 / rows(x))),
    "times_len": (r"__len__ .* x\.shape\[0\]", lambda net, x: x * len(x)),
    "times_numel": ("number of rows", lambda net, x: x * x.numel()),
    "root": ("number of rows", lambda net, x: x * math.sqrt(rows(x))),
    "int": ("number of rows", lambda net, x: x * int(rows(x))),
    "if_many": ("number of rows", lambda net, x: x * 2 if rows(x) > 5 else x),
    "places": (
        "arange.* not NumberOfRows",
        lambda net, x: x + torch.arange(rows(x)).view(-1, 1, 1, 1),
    ),
    "shuffled": (
        "randperm",
        lambda net, x: x[torch.randperm(rows(x))],
    ),
    "tensor_of_rows": ("tensor", lambda net, x: x * torch.tensor(rows(x))),
    "parts": ("for 3 rows", lambda net, x: torch.cat([x[:1] * 2, x[1:]])),
    "unbind": ("more tensors", lambda net, x: torch.stack(x.unbind(0))),
    "bool_index": ("for 3 rows", lambda net, x: x * x[x > 0].sum()),
    "item": ("item", lambda net, x: x * x.mean().item()),
    "numpy": ("numpy", lambda net, x: x * x.detach().numpy().mean()),
    "float": ("__float__", lambda net, x: x * float(x.max())),
    "text": ("__format__", lambda net, x: x * len(f"{x}")),
    "if": (r"__bool__ .* torch\.where", lambda net, x: x if (x > 0).any() else -x),
    "equal": ("equal", lambda net, x: x if torch.equal(x, x) else -x),
    "data": (r"data\.__set__", after(lambda net, x: setattr(x, "data", x.data * 2))),
    "inner_gradient": ("grad on", lambda net, x: torch.autograd.grad(x.sum(), x)[0]),
    "hook": ("register_hook", after(lambda net, x: x.register_hook(lambda g: 2 * g))),
    "kept": ("something outside", after(lambda net, x: KEPT.append(x))),
    "average": ("tensor of all", after(lambda net, x: net.average.add_(x.mean()))),
    "left_mean": ("aux a tensor", after(lambda net, x: setattr(net, "aux", x.mean()))),
    "over_a_layer": ("view from before", over_a_layer),
    "vmap": ("aten.sin", lambda net, x: torch.vmap(torch.sin)(x)),
    "instance_norm": (
        "track_running_stats",
        lambda net, x: F.instance_norm(x, net.mean, net.var, use_input_stats=True),
    ),
    "native": (
        "only batch_norm",
        lambda net, x: torch.native_batch_norm(
            x, None, None, None, None, True, 0.1, 1e-5
        )[0],
    ),
    "generator": (
        "generator=",
        lambda net, x: x * torch.rand(x.shape, generator=torch.Generator()),
    ),
}
