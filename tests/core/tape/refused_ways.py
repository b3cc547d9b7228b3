"""What a forward may not do between two layers of BatchNorm, or draws again."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.core.tape.ways import GLOBAL, ONE, Case, after, hook, rows, turn_on
from tests.zoo.conv_nets import pooled


def refused(said: str, ways: dict[str, Any]) -> dict[str, Case]:
    """Cases whose error says so; a way that needs more is a case already."""
    cases = {n: w if isinstance(w, Case) else Case(w) for n, w in ways.items()}
    return {name: replace(case, refused=said) for name, case in cases.items()}


# ---- ways of several lines -----------------------------------------------------------


def over_a_layer(net: Any, x: Tensor) -> Tensor:
    x = x.sin()
    view = x[:, :2]
    y = net.one[1](x * 1)
    x.mul_(3)
    return torch.cat([view, x[:, 2:]], 1) + y


def normed(x: Tensor, weight: Tensor | None = None) -> Tensor:
    return F.batch_norm(x, None, None, weight, training=True)


class Norming(torch.autograd.Function):
    """Which normalises by the rows that it gets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return normed(x)

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


class Drops(nn.Module):
    """Layers and functions that draw for each row."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Dropout(0.3), nn.Dropout2d(0.3, True), nn.AlphaDropout(0.2)
        self.layers = nn.Sequential(*layers, nn.RReLU())

    def forward(self, x: Tensor) -> Tensor:
        half = torch.bernoulli(torch.full_like(x, 0.5))
        return self.layers(x * 1) + half * torch.empty_like(x).uniform_()


# ---- what is refused -----------------------------------------------------------------

ROWS_THAT_SEE: dict[str, Case] = {
    **refused(
        "see each other",
        {
            "softmax": lambda net, x: x.softmax(0),
            "flip": lambda net, x: x + x.flip(0),
            "cumsum": lambda net, x: x.cumsum(0),
            "sort": lambda net, x: x.sort(0)[0],
            "gram": lambda net, x: x * (x.flatten(1) @ x.flatten(1).T).mean(),
            "into_statistics": after(lambda net, x: net.one[1](x.cumsum(0))),
            "normed_backward": normed_backward,
            "straight_through": straight_through,
            "counted_in_use": Case(
                lambda net, x: x * net.calls + net.calls.add_(1),
                lambda: {"calls": torch.ones(())},
            ),
        },
    ),
    **refused(
        "one value of all rows",
        {
            "norm": lambda net, x: x / x.norm(),
            "largest": lambda net, x: x / x.amax(),
            "first": lambda net, x: x - x[:1],
        },
    ),
    **refused("mean .* one value of all rows", {"mean": lambda net, x: x - x.mean(0)}),
    **refused(
        "all rows", {"einsum": lambda net, x: x + torch.einsum("bchw,bchw->chw", x, x)}
    ),
    **refused(
        "only functional.batch_norm",
        {
            "native": lambda net, x: torch.native_batch_norm(
                x, None, None, None, None, True, 0.1, 1e-5
            )[0],
            "batch_norm": lambda net, x: torch.batch_norm(
                x, None, None, None, None, True, 0.1, 1e-5, False
            ),
        },
    ),
    **refused(
        "batch_norm .* has no rows, or channels",
        {
            "normed_columns": lambda net, x: normed(x.transpose(0, 1)),
            "normed_sum": lambda net, x: normed(x.sum(0, True)),
            "normed_weight": lambda net, x: normed(net.token, x.mean((0, 2, 3))),
        },
    ),
    "weights_of_batch": Case(
        lambda net, x: normed(x, x.mean((0, 2, 3))),
        refused="batch_norm .* its weights depend on the batch",
    ),
    "normed_within": Case(
        lambda net, x: Norming.apply(x),
        refused="batch_norm .* in an autograd.Function",
    ),
    "instance_norm": Case(
        lambda net, x: F.instance_norm(x, net.mean, net.var, use_input_stats=True),
        lambda: {"mean": torch.zeros(4), "var": torch.ones(4)},
        refused="instance_norm .* in place",
    ),
}

NUMBERS_AND_VALUES: dict[str, Case] = {
    **refused(
        "number of rows",
        {
            "by_rows": lambda net, x: x / rows(x),
            "by_a_share": lambda net, x: x * (1.0 / rows(x)),
            "times_numel": lambda net, x: x * x.numel(),
            "root": lambda net, x: x * math.sqrt(rows(x)),
            "int": lambda net, x: x * int(rows(x)),
            "if_many": lambda net, x: x * 2 if rows(x) > 5 else x,
        },
    ),
    **refused(r"__len__ .* x\.shape\[0\]", {"times_len": lambda net, x: x * len(x)}),
    "places": Case(
        lambda net, x: x + torch.arange(rows(x)).view(-1, 1, 1, 1),
        refused="arange.* not NumberOfRows",
    ),
    "shuffled": Case(
        lambda net, x: x[torch.randperm(rows(x))],
        refused="randperm .* gets the number of rows",
    ),
    **refused("tensor", {"tensor_of_rows": lambda net, x: x * torch.tensor(rows(x))}),
    **refused(
        "for 3 rows",
        {
            "parts": lambda net, x: torch.cat([x[:1] * 2, x[1:]]),
            "bool_index": lambda net, x: x * x[x > 0].sum(),
        },
    ),
    **refused("more tensors", {"unbind": lambda net, x: torch.stack(x.unbind(0))}),
    "offset": Case(
        lambda net, x: x * x[-1].storage_offset(),
        refused="storage_offset .* it is 512 for one chunk and 256 for another",
    ),
    **refused(
        "off by inf",
        {
            "other_shape": Case(other_shape, is_whole=True),
            "more_outputs": Case(more_outputs, is_whole=True),
        },
    ),
    **refused("item", {"item": lambda net, x: x * x.mean().item()}),
    **refused("numpy", {"numpy": lambda net, x: x * x.detach().numpy().mean()}),
    **refused("__float__", {"float": lambda net, x: x * float(x.max())}),
    **refused("__format__", {"text": lambda net, x: x * len(f"{x}")}),
    **refused("equal", {"equal": lambda net, x: x if torch.equal(x, x) else -x}),
    "if": Case(
        lambda net, x: x if x.sum() > 0 else -x, refused=r"__bool__ .* torch\.where"
    ),
    **refused(
        "Python reads values",
        {"reading": reading, "vmap": lambda net, x: torch.vmap(torch.sin)(x)},
    ),
}

GRADIENTS_AND_STATE: dict[str, Case] = {
    "data": Case(
        after(lambda net, x: setattr(x, "data", x.data)), refused=r"data\.__set__"
    ),
    "inner_gradient": Case(
        lambda net, x: torch.autograd.grad(x.sum(), x)[0], refused="grad on"
    ),
    "hook": Case(
        after(lambda net, x: x.register_hook(lambda g: 2 * g)), refused="register_hook"
    ),
    "given_away": Case(
        lambda net, x: Calling.apply(net.body, x),
        lambda: {"body": nn.Tanh()},
        refused="gets a function or a module",
    ),
    "generator": Case(
        lambda net, x: x * torch.rand(x.shape, generator=torch.Generator()),
        refused="generator=",
    ),
    # what stays behind
    **refused(
        "something outside",
        {
            "global": after(lambda net, x: GLOBAL.update(kept=x)),
            "left_in_list": Case(
                after(lambda net, x: net.seen.append(x * 2)), lambda: {"seen": []}
            ),
        },
    ),
    **refused(
        "aux keeps",
        {
            "left": after(lambda net, x: setattr(net, "aux", x.square())),
            "left_mean": after(lambda net, x: setattr(net, "aux", x.mean())),
        },
    ),
    "left_in_buffer": Case(
        after(lambda net, x: setattr(net, "mean", x.mean(1))),
        lambda: {"mean": torch.zeros(())},
        refused="mean keeps",
    ),
    "average": Case(
        after(lambda net, x: net.mean.add_(x.mean())),
        lambda: {"mean": torch.zeros(())},
        refused="tensor of all",
    ),
    **refused(
        "tensor of all chunks", {"sum_in_place": summing, "view_in_place": filled}
    ),
    "argument_in_place": Case(
        lambda net, x: net.fc(pooled(net.one(x.mul_(2)))),
        is_whole=True,
        refused="writes into an argument",
    ),
    "within_a_transform": Case(
        lambda net, x: x * torch.func.grad(lambda s: (s * x).mul_(2).sum())(ONE),
        refused="mul_ .* in place that others need",
    ),
    **refused("view from before", {"over_a_layer": over_a_layer}),
    # later
    "keeps_later": Case(
        after(lambda net, x: setattr(net, "kept", x if GLOBAL["is_on"] else None)),
        change=turn_on,
        refused="kept keeps",
    ),
    "backward_hook": Case(
        change=hook("two", "backward"), refused="two has backward hooks"
    ),
    "backward_hook_of_leaf": Case(
        change=hook("two.0", "backward"), refused=r"two\.0 has backward hooks"
    ),
}

REFUSED = {**ROWS_THAT_SEE, **NUMBERS_AND_VALUES, **GRADIENTS_AND_STATE}

DRAWN: dict[str, Case] = {
    "noise": Case(lambda net, x: x + torch.randn_like(x) * 0.3 + F.dropout(x, 0.4)),
    "dropout_in_front": Case(
        lambda net, x: net.fc(pooled(net.two(net.one(F.dropout(x, 0.3))))),
        is_whole=True,
    ),
    "drops": Case(lambda net, x: net.part(x), lambda: {"part": Drops()}),
    "checkpoint": Case(
        lambda net, x: checkpoint(net.part, x, use_reentrant=False),
        lambda: {"part": nn.Sequential(nn.Conv2d(4, 4, 1), nn.Dropout(0.3), nn.Tanh())},
    ),
}
"""What draws for each row."""
