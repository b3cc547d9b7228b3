"""Parameters that join the training later, with gradients kept in float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.core.common import relative
from tests.helpers import TOLERANCE, gradients
from trainkit import Accumulator, PerSample, Uniform

EXACT = TOLERANCE[torch.float64]
ROWS = torch.randn(
    12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
)
SIZES = [1, 5, 2, 4]


def make_net() -> nn.Sequential:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    net[0].requires_grad_(False)
    return net


def loss_of(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return net(x).square().mean()


@pytest.mark.parametrize("wide", [True, False])
def test_unfrozen_between_windows_equals_the_big_batch(wide: bool) -> None:
    net, whole = make_net(), make_net()
    accumulator = Accumulator(PerSample(), module=net, wide_gradients=wide)
    for window in range(2):
        if window == 1:
            net[0].requires_grad_(True)
            whole[0].requires_grad_(True)
        for each in (net, whole):
            each.zero_grad()
        for x in ROWS.split(SIZES):
            accumulator.backward(loss_of(net, x), x)
        accumulator.finish(net.parameters())
        loss_of(whole, ROWS).backward()
        assert relative(gradients(net), gradients(whole)) <= EXACT


def test_unfrozen_inside_a_window_joins_with_the_next_pass() -> None:
    net, whole = make_net(), make_net()
    accumulator = Accumulator(PerSample(), module=net, wide_gradients=True)
    for number, x in enumerate(ROWS.split(SIZES)):
        if number == 2:
            net[0].requires_grad_(True)
            whole[0].requires_grad_(True)
        accumulator.backward(loss_of(net, x), x)
        (loss_of(whole, x) * len(x) / len(ROWS)).backward()
    accumulator.finish(net.parameters())
    assert relative(gradients(net), gradients(whole)) <= EXACT


def test_parameters_outside_of_the_module_are_divided_too() -> None:
    net, whole = make_net(), make_net()
    accumulator = Accumulator(PerSample(), module=net[2], wide_gradients=True)
    for each in (net, whole):
        each[0].requires_grad_(True)
    for x in ROWS.split(SIZES):
        accumulator.backward(loss_of(net, x), x)
    accumulator.finish(net.parameters())
    loss_of(whole, ROWS).backward()
    assert relative(gradients(net), gradients(whole)) <= EXACT


def test_who_joins_is_summed_in_float32_too() -> None:
    """In bfloat16, 256 + 1 is 256."""
    net = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    net.extra = nn.Parameter(torch.ones(1, dtype=torch.bfloat16), requires_grad=False)
    parts = [256.0, *64 * [1.0]]
    accumulator = Accumulator(Uniform(), module=net, wide_gradients=True)
    for window in range(2):
        net.extra.requires_grad_(window == 1)
        net.zero_grad()
        for part in parts:
            loss = (net.weight.sum() + net.extra.sum()) * part
            accumulator.backward(loss, weight=1)
        accumulator.finish(net.parameters())
    for parameter in (net.weight, net.extra):
        assert parameter.grad is not None
        assert abs(float(parameter.grad.sum()) - 320 / 65) < 0.02
