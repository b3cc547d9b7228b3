"""The step that the tests of exact BatchNorm compare with the big batch's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.core.tape.cases import CASES, images, made
from trainkit import exact_batch_norm

EXACT = 1e-12
"""How far a gradient may be from the big batch's, in float64."""

NAIVE = 0.1
"""How far plain accumulation is, at least."""


def off_by(found: Any, wanted: Any) -> float:
    """The relative distance of two lists of tensors."""
    pairs = list(zip(found, wanted, strict=True))
    apart = sum(
        float((a.double() - b.double()).detach().square().sum()) for a, b in pairs
    )
    whole = sum(float(b.detach().double().square().sum()) for _, b in pairs)
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
