"""Nets in which something changes between two windows, or that tracing cannot see."""

from __future__ import annotations

import copy
import functools
import random
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.core.tape.traps import Trap

GLOBAL = {"scale": 1.0, "is_on": False}


class Odd(Trap):
    """What lies between its layers is given; so are its attributes.

    Args:
        way: of the net and the values.
        attributes: tensors among them are buffers, but for a `plain` one.
    """

    def __init__(self, way: Callable[[Any, Tensor], Tensor], **attributes: Any) -> None:
        super().__init__()
        self.way = way
        for name, value in attributes.items():
            if isinstance(value, Tensor) and name != "plain":
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def between(self, x: Tensor) -> Tensor:
        return self.way(self, x)


class Leaf(nn.Module):
    """A part without a layer, which runs as it is.

    Args:
        way: of it and the values.
    """

    def __init__(self, way: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.way, self.generator = way, None
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def leaf(way: Callable[[Any, Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Odd(lambda net, x: net.part(x), part=Leaf(way))


def put(**values: Any) -> Callable[[Any], None]:
    """Sets attributes; where there is a function, to what it makes of the old value."""

    def change(net: Any) -> None:
        for name, value in values.items():
            old = getattr(net, name)
            is_made = isinstance(value, types.LambdaType)
            setattr(net, name, value(old) if is_made else value)

    return change


def turn_on(net: Any) -> None:
    GLOBAL["is_on"] = True


def if_small(net: Any, x: Tensor) -> Tensor:
    return x.sin() if net.buffer < 0.7 else x


def summing(net: Any, x: Tensor) -> Tensor:
    total = torch.zeros(4, 1, 1, dtype=torch.float64)
    total += x.detach().square().sum((0, 2, 3)).view(4, 1, 1) * 0 + 1
    return x * total


def setting(net: Any, x: Tensor) -> Tensor:
    net.buffer = x.detach().mean() * 0 + 1
    net.last = x.detach()
    net.seen.append(net.last)
    return x * net.buffer


def filled(net: Any, x: Tensor) -> Tensor:
    table = torch.zeros(2, 4, 1, 1)
    row = table[0]
    row += x.detach()[0, :, :1, :1] * 0 + 1
    return x * table[0]


def by_all_weights(net: Any, x: Tensor) -> Tensor:
    return x * sum(each.square().sum() for each in net.parameters())


def spectrum(net: Any, x: Tensor) -> Tensor:
    z = torch.fft.rfft2(x)
    return torch.fft.irfft2(z * net.one[1](z.abs()).tanh())


def in_mode(part: Any, x: Tensor) -> Tensor:
    return x.sin() if torch.is_grad_enabled() else x


def drawing(part: Any, x: Tensor) -> Tensor:
    return x * (0.5 + random.random() + np.random.rand()) if GLOBAL["is_on"] else x


def own_noise(part: Any, x: Tensor) -> Tensor:
    return x * torch.rand(x.shape[-1:], generator=part.generator)


def keeping(part: Any, x: Tensor) -> Tensor:
    if GLOBAL["is_on"]:
        part.kept = x.detach()
    return x * 2


def caching(part: Any, x: Tensor) -> Tensor:
    """Makes a table once."""
    if GLOBAL["is_on"] and part.table is None:
        part.table = torch.arange(8.0)
    return x if part.table is None else x * part.table


def writing(part: Any, x: Tensor) -> Tensor:
    return x.mul_(2) if GLOBAL["is_on"] else x * 2


def over_a_layer(net: Any, x: Tensor) -> Tensor:
    y = x + 1
    return net.one[1](x) + net.part(y)


def scale(net: Any) -> None:
    GLOBAL["scale"] = 0.3


def hook(path: str, kind: str = "forward") -> Callable[[Any], None]:
    """A hook that doubles what comes out, or its gradient."""

    def change(net: Any) -> None:
        module = net.get_submodule(path)
        if kind == "forward":
            module.register_forward_hook(lambda m, a, out: 2 * out)
        else:
            module.register_full_backward_hook(lambda m, a, out: (2 * a[0],))

    return change


@dataclass
class Case:
    """A net, and what happens to it between two windows.

    Attributes:
        make: the net.
        change: it.
        why: it runs in one graph at last, for this reason.
        draws: whether each micro-batch draws, so that the big batch is another one.
    """

    make: Callable[[], nn.Module]
    change: Callable[[Any], Any] = field(default=lambda net: None)
    why: str = ""
    draws: bool = False


def odd(way: Any, change: Any = lambda net: None, why: str = "", **given: Any) -> Case:
    return Case(lambda: Odd(way, **copy.deepcopy(given)), change, why)


ONE = torch.tensor(1.0, dtype=torch.float64)
CASES = {
    # What is fixed in tracing.
    "buffer_filled": odd(
        lambda net, x: x * (2 - net.buffer),
        lambda net: net.buffer.fill_(0.2),
        buffer=ONE,
    ),
    "buffer_replaced": odd(
        lambda net, x: x * net.buffer, put(buffer=ONE * 0.2), buffer=ONE
    ),
    "buffer_asked": odd(
        if_small, lambda net: net.buffer.fill_(0.2), "TraceError", buffer=ONE
    ),
    "buffer_from_list": odd(
        lambda net, x: x * (2 - dict(net.named_buffers())["buffer"]),
        lambda net: net.buffer.fill_(0.2),
        "computes a tensor of others",
        buffer=ONE,
    ),
    "plain_tensor_replaced": odd(
        lambda net, x: x * net.plain, put(plain=ONE * 0.2), plain=ONE
    ),
    "tensor_of_numbers": odd(
        lambda net, x: x * torch.tensor(net.scales).view(4, 1, 1),
        put(scales=[4.0, 3.0, 2.0, 0.5]),
        scales=[1.0, 2.0, 3.0, 4.0],
    ),
    "tensor_of_array": odd(
        lambda net, x: x * torch.from_numpy(net.scales).view(4, 1, 1),
        lambda net: np.copyto(net.scales, [4.0, 3.0, 2.0, 0.5]),
        "computes a tensor of others",
        scales=np.array([1.0, 2.0, 3.0, 4.0]),
    ),
    "config": odd(
        lambda net, x: x * net.config.scale,
        lambda net: vars(net.config).update(scale=0.3),
        config=types.SimpleNamespace(scale=1.0),
    ),
    "partial": odd(
        lambda net, x: net.act(x),
        put(act=functools.partial(F.leaky_relu, negative_slope=0.7)),
        act=functools.partial(F.leaky_relu, negative_slope=0.1),
    ),
    "global": odd(lambda net, x: x * GLOBAL["scale"], scale),
    "double": Case(
        lambda: Odd(lambda net, x: x @ net.buffer, buffer=torch.eye(8)).float(),
        lambda net: net.double(),
    ),
    # One tensor for all micro-batches.
    "sum_in_place": odd(summing, why="changes a tensor that is no argument"),
    "view_in_place": odd(filled, why="add_ changes a tensor that is no argument"),
    "by_a_part": odd(
        lambda net, x: x * net.part(torch.ones(4, 1, 1)),
        why="one for all micro-batches",
        part=Leaf(lambda part, x: x.add_(1)),
    ),
    "all_weights": odd(by_all_weights, why="computes a tensor of others"),
    # What parts do that are not traced.
    "nested_gradients": Case(
        leaf(lambda part, x: x * torch.func.grad(torch.sin)(ONE)),
    ),
    "complex": odd(spectrum),
    "mode_of_gradients": Case(leaf(in_mode), why="its outputs are others"),
    "draws_later": Case(leaf(drawing), turn_on, draws=True),
    "own_generator": Case(
        leaf(own_noise),
        lambda net: put(generator=torch.Generator().manual_seed(9))(net.part),
        draws=True,
    ),
    "keeps_later": Case(leaf(keeping), turn_on, "leaves tensors in part.kept"),
    "cache_later": Case(leaf(caching), turn_on),
    "writes_later": odd(over_a_layer, turn_on, "in other windows", part=Leaf(writing)),
    # Hooks.
    "hook_of_layer": Case(Trap, hook("one.1"), "one.1: it has hooks"),
    "hook_of_block": Case(Trap, hook("one"), "one: it has hooks"),
    "hook_of_leaf": Case(Trap, hook("two.0"), "two.0: it has forward hooks"),
    "backward_hook": Case(Trap, hook("two", "backward"), "two: it has hooks"),
    "backward_hook_of_leaf": Case(Trap, hook("two.0", "backward")),
}
