"""A window of micro-batches, run by a step that the tests give."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.core.joins.common import (
    EXACT,
    gradients,
    off_by,
    state,
    summed,
)
from tests.core.tape.cases import images
from tests.core.tape.nets import conv_bn
from tests.core.tape.traps import Trap
from trainkit.core.joins.exact import exact_batch_norm

SIZES = [4, 2, 3]
X = images(9)
Step = Callable[[Any], Callable[[Tensor], Tensor]]


def simple(net: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: summed([net(x)])


def run(net: Any, step: Any, x: Any = None) -> None:
    for _, loss in net.run(step, X.split(SIZES) if x is None else x):
        loss.backward(retain_graph=net.needs_graph)


def compare(own: nn.Module, step: Step, memory: Any, big: Any = None) -> Any:
    """The gradient and the buffers are the big batch's; return what ran."""
    big = big or copy.deepcopy(own)
    torch.manual_seed(5)
    step(big)(X).backward()
    net = exact_batch_norm(own, memory=memory)
    torch.manual_seed(5)
    run(net, step(net if isinstance(own, Trap) else own))
    assert off_by(gradients(own), gradients(big)) <= EXACT
    assert off_by(state(own), state(big)) <= EXACT
    return net


def several() -> Any:
    torch.manual_seed(1)
    parts = {
        "pre": nn.Conv2d(3, 3, 1),
        "first": conv_bn(3, 3, nn.Tanh()),
        "second": Trap(),
        "bn": nn.BatchNorm1d(5),
    }
    return nn.ModuleDict(parts).double()
