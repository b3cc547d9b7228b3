"""The step that the tests of exact BatchNorm compare with the big batch's."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.core.joins.cases import CASES, images, made
from trainkit import exact_batch_norm

EXACT = 1e-10
"""How far a gradient may be from the big batch's, in float64."""

NAIVE = 0.1
"""How far plain accumulation is, at least."""

SIZES = {"even": [4, 4, 4], "ragged": [5, 1, 3, 2], "ones": [1] * 6, "one": [7]}


def off_by(found: Any, wanted: Any) -> float:
    """The relative distance of two lists of tensors."""
    pairs = list(zip(found, wanted, strict=True))
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    whole = sum(float(b.double().square().sum()) for _, b in pairs)
    return (apart / whole if apart else 0.0) ** 0.5


def gradients(net: nn.Module) -> list[Tensor]:
    return [
        torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for p in net.parameters()
    ]


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
        loss: of the whole window.
        gradients: of the parameters, then of the input, if it has one.
        state: the buffers.
        net: after it.
    """

    loss: float
    gradients: list[Tensor]
    state: list[Tensor]
    net: nn.Module


def big(name: str, rows: int, loss: Any, dtype: torch.dtype = torch.float64) -> Found:
    """One step with the big batch."""
    net, x = made(name, dtype), images(rows, dtype).requires_grad_()
    total = loss(CASES[name].call(net, x))
    total.backward()
    assert x.grad is not None
    return Found(total.item(), [*gradients(net), x.grad], state(net), net)


def engines_of(net: Any) -> list[Any]:
    """Of the modules that were called."""
    return net._joined.engines


def check_way(net: Any, memory: str) -> None:
    """All calls ran in segments, or none."""
    engines = engines_of(net)
    assert engines
    for each in engines:
        is_layer = isinstance(each.module, nn.modules.batchnorm._BatchNorm)
        if memory == "flat" and not is_layer:
            assert each.is_flat, f"{each.name}: {each.why_not}"
        assert not each.is_flat or memory == "flat"


def in_chunks(
    name: str, rows: int, size: int, memory: Any, dtype: torch.dtype = torch.float64
) -> Found:
    """One step whose batch is cut where the net is called."""
    own = made(name, dtype)
    before = copy.deepcopy(own.state_dict())
    net, x = exact_batch_norm(own, size=size, memory=memory), images(rows, dtype)
    assert list(net.state_dict()) == list(before)
    x.requires_grad_()
    total = any_loss(CASES[name].call(net, x))
    total.backward()
    check_way(net, memory)
    net.remove()
    check_clean(own)
    assert x.grad is not None
    return Found(total.item(), [*gradients(own), x.grad], state(own), own)


def in_steps(
    name: str, sizes: Sequence[int], memory: Any, dtype: torch.dtype = torch.float64
) -> Found:
    """One step whose micro-batches are given."""
    own = made(name, dtype)
    net, x = exact_batch_norm(own, memory=memory), images(sum(sizes), dtype)
    x.requires_grad_()
    total = 0.0
    steps = net.run(lambda part: summed(CASES[name].call(net, part)), x.split(sizes))
    for _, loss in steps:
        loss.backward()
        total += loss.item()
    if len(sizes) > 1:
        check_way(net, memory)
    net.remove()
    check_clean(own)
    assert x.grad is not None
    return Found(total, [*gradients(own), x.grad], state(own), own)


def accumulated(name: str, sizes: Sequence[int]) -> Found:
    """One step of plain accumulation."""
    net, x = made(name), images(sum(sizes)).requires_grad_()
    total = 0.0
    for part in x.split(list(sizes)):
        loss = summed(CASES[name].call(net, part))
        loss.backward()
        total += loss.item()
    assert x.grad is not None
    return Found(total, [*gradients(net), x.grad], state(net), net)


def check_clean(net: nn.Module) -> None:
    """Nothing stays in a module."""
    for name, each in net.named_modules():
        assert "forward" not in vars(each), name
        assert not each._forward_hooks, name
        assert not each._forward_pre_hooks, name


def check_same(found: Found, wanted: Found, at_most: float = EXACT) -> None:
    """Loss, gradients and buffers are the big batch's."""
    assert abs(found.loss - wanted.loss) <= at_most * abs(wanted.loss)
    assert off_by(found.gradients, wanted.gradients) <= at_most
    for one, other in zip(found.state, wanted.state, strict=True):
        assert one.dtype == other.dtype
        assert off_by([one], [other]) <= at_most
