"""Nets whose forward does what a tracer may miss."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.core.tape.nets import CLASSES, conv, conv_bn, pooled


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


class NoGrad(Trap):
    def between(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.mean(1, keepdim=True) + 2
        return x * scale


class Teacher(Trap):
    """A part with BatchNorm whose output gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = conv_bn(4, 4, nn.Tanh())

    def between(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            other = self.teacher(x)
        return x * (other + 2)


class EnabledAgain(Trap):
    """Decorated functions change the mode as well."""

    @torch.no_grad()
    def scale(self, x: Tensor) -> Tensor:
        return self.one[1](x * 2).sigmoid()

    def between(self, x: Tensor) -> Tensor:
        return x * self.scale(x)


class Autocast(Trap):
    def between(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = F.conv2d(x.float(), self.two[0].weight.float(), padding=1)
        return x + y.to(x.dtype)


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore
        return 3 * gradient


class OwnFunction(Trap):
    """Whose gradient is not that of its operations."""

    def between(self, x: Tensor) -> Tensor:
        return Through.apply(x)  # type: ignore[return-value]


class Calling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, body: nn.Module, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.body = body
        return body(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (found,) = torch.autograd.grad(ctx.body(x), x, gradient)
        return None, found


class GivenAway(Trap):
    """A module is an argument of a function."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Tanh()

    def between(self, x: Tensor) -> Tensor:
        return Calling.apply(self.body, x)  # type: ignore[return-value]


class Hooked(Trap):
    def between(self, x: Tensor) -> Tensor:
        x = x * 1
        x.register_hook(lambda gradient: 2 * gradient)
        return x


class Detached(Trap):
    def between(self, x: Tensor) -> Tensor:
        return x * x.detach().mean(1, keepdim=True) + x.data


class PythonDraws(Trap):
    """Stochastic depth by Python's generator."""

    def between(self, x: Tensor) -> Tensor:
        return x * 3 if random.random() < 0.5 else x.sin()


class NumpyDraws(Trap):
    def between(self, x: Tensor) -> Tensor:
        return x * float(np.random.rand())


class TorchDraws(Trap):
    """Noise of the shape of the values."""

    def between(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) * 0.3 + F.dropout(x, 0.4)


class FixedDraws(Trap):
    def between(self, x: Tensor) -> Tensor:
        return x * torch.rand(1, 4, 1, 1)


class OwnGenerator(Trap):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def between(self, x: Tensor) -> Tensor:
        noise = torch.rand(1, 4, 1, 1, generator=self.generator)
        return x * (noise + 0.5)


class OnValues(Trap):
    def between(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > -1e9 else x


class OnShape(Trap):
    """Asks about numbers that are the same for all micro-batches."""

    def between(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or x.ndim != 4 or len(x.shape) != 4:
            raise ValueError(x.shape)
        if x.is_cuda or not x.dtype.is_floating_point:
            raise ValueError(x.dtype)
        return x + torch.zeros(x.shape[0], 1, 1, 1, dtype=x.dtype, device=x.device)


class Checkpointed(Trap):
    """Activation checkpointing of what lies between two layers."""

    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Dropout(0.3), nn.Tanh())
        self.reentrant = reentrant

    def between(self, x: Tensor) -> Tensor:
        found = checkpoint(self.body, x, use_reentrant=self.reentrant)
        return found  # type: ignore[return-value]


class CheckpointedLayer(Trap):
    """A BatchNorm inside a checkpoint."""

    def forward(self, x: Tensor) -> Any:
        x = self.one(x)
        x = checkpoint(self.two, x, use_reentrant=False)  # type: ignore[assignment]
        return self.fc(pooled(x))


class Changing(Trap):
    """An attribute that is a function is another one later."""

    def __init__(self) -> None:
        super().__init__()
        self.act: Any = torch.sin

    def between(self, x: Tensor) -> Tensor:
        return self.act(x * 2)


class Listed(Trap):
    """Attributes of other kinds, which may change as well."""

    def __init__(self) -> None:
        super().__init__()
        self.scales, self.shift = [1.0, 2.0], None
        self.options = {"power": 2}

    def between(self, x: Tensor) -> Tensor:
        x = x * sum(self.scales) ** self.options["power"] / 9
        return x if self.shift is None else x.sin() + self.shift


class OwnWeight(Trap):
    """Weights of the net itself, returned as well; a buffer; a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(1, 4, 1, 1) + 0.5)
        self.shift: Tensor
        self.register_buffer("shift", torch.rand(1, 4, 1, 1))

    def between(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift + torch.arange(4).view(1, 4, 1, 1)


class Counting(Trap):
    """A buffer moves in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def between(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


class CountingWithin(Trap):
    """The same, in a part that is not traced."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * 2

    def __init__(self) -> None:
        super().__init__()
        self.part = self.Part()

    def between(self, x: Tensor) -> Tensor:
        return self.part(x)


class Remembers(Trap):
    """Keeps something of a call for a loss, as models do with auxiliary losses."""

    def between(self, x: Tensor) -> Tensor:
        self.aux = x.square().mean((1, 2, 3))
        return x


class Alias(Trap):
    """A view of a value that is changed in place behind a layer."""

    def forward(self, x: Tensor) -> Any:
        x = self.one(x) * 1
        view = x[:, :2]
        out = self.two(x + 0)
        x.mul_(2)
        x += self.one[1](out)
        return self.fc(pooled(torch.cat([view, x[:, 2:]], 1)))


class Rewritten(Trap):
    """What a layer gets is changed in place before its result is used."""

    def forward(self, x: Tensor) -> Any:
        h = self.one[0](x)
        n = self.one[1](h + 0)
        h.mul_(2)
        m = self.two[1](self.two[0](h))
        return self.fc(pooled(torch.tanh(n) * m))


class BatchMean(Trap):
    """Couples rows by something else than a BatchNorm."""

    def between(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Functional(Trap):
    def between(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)


class OwnForward(Trap):
    class Layer(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).relu()

    def __init__(self) -> None:
        super().__init__()
        self.one[1] = self.Layer(4)


class Raising(Trap):
    at: int = 10**6
    count: int = 0

    def between(self, x: Tensor) -> Tensor:
        if x.abs().max() > 1e6:
            raise ValueError("too large")
        return x


class OtherNorms(Trap):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.Sequential(
            nn.InstanceNorm2d(4, affine=True),
            nn.GroupNorm(2, 4),
            nn.LayerNorm([4, 8, 8]),
        )

    def between(self, x: Tensor) -> Tensor:
        return self.norms(x)


class Lora(nn.Module):
    """A convolution that does not train, and a small one beside it that does."""

    def __init__(self, base: nn.Conv2d) -> None:
        super().__init__()
        self.base = copy.deepcopy(base).requires_grad_(False)
        self.down, self.up = conv(4, 2, 1), conv(2, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def with_lora() -> nn.Module:
    net: Any = Trap()
    net.two[0] = Lora(net.two[0])
    net.one.requires_grad_(False)
    return net


def with_weight_norm() -> nn.Module:
    net: Any = Trap()
    nn.utils.parametrizations.weight_norm(net.two[0])
    nn.utils.parametrizations.weight_norm(net.fc)
    return net


class Positive(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(x)


def with_parametrized_layer() -> nn.Module:
    """A weight of a BatchNorm that is made of another."""
    net: Any = Trap()
    nn.utils.parametrize.register_parametrization(net.two[1], "weight", Positive())
    return net


def with_tied_weights() -> nn.Module:
    net: Any = Trap()
    net.two[1].weight = net.one[1].weight
    net.two[1].bias = net.fc.bias = nn.Parameter(torch.zeros(4))
    net.fc = nn.Linear(4, 4)
    net.fc.bias = net.two[1].bias
    return net


def made(name: str) -> Any:
    """One of the nets above."""
    torch.manual_seed(0)
    return globals()[name]().double()
