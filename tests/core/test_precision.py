"""Narrow dtypes: no weight is rounded, nothing overflows, no step is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.core.common import GivenWeight, fresh_net, padded, relative, run_window
from tests.helpers import deviation, gradients, ragged_sequences, token_loss
from trainkit import Accumulator, PerToken
from trainkit.errors import TrainkitError

SAMPLES = ragged_sequences(16, longest=30)
CUT = [padded(SAMPLES[:1]), padded(SAMPLES[1:6]), padded(SAMPLES[6:])]

# Rounding of each micro-batch's own gradient, in units of the dtype's precision.
HALF_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", HALF_TOLERANCE, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_half_precision_equals_big_batch_up_to_rounding(
    dtype: torch.dtype, reduction: Any
) -> None:
    net, reference = fresh_net(torch.float32).to(dtype), fresh_net(torch.float32)
    reference.load_state_dict(net.state_dict())
    stats = run_window(net, CUT, PerToken(loss_reduction=reduction))
    token_loss(reference, padded(SAMPLES)).backward()
    assert relative(gradients(net), gradients(reference)) <= HALF_TOLERANCE[dtype]
    assert float(stats.weight) == sum(float(PerToken().weight(b)) for b in CUT)


@pytest.mark.parametrize("dtype", HALF_TOLERANCE, ids=str)
@pytest.mark.parametrize("divided_by", [1, 3])
def test_weight_1001_of_a_half_precision_loss_is_not_rounded(
    dtype: torch.dtype, divided_by: int
) -> None:
    """bfloat16(1001) is 1000: what was applied is what the window divides by, so equal
    micro-batches keep their gradient."""
    parameter = nn.Parameter(torch.ones(4, dtype=dtype))
    accumulator = Accumulator(GivenWeight())
    for _ in range(4):
        loss = parameter.sum() / divided_by
        accumulator.weigh(loss, 1001, divided_by=divided_by)
        loss.backward()
    stats = accumulator.finish([parameter])
    assert float(stats.weight) == 4004
    torch.testing.assert_close(parameter.grad, torch.ones_like(parameter))


def test_half_precision_loss_on_float32_weights_equals_what_was_applied() -> None:
    """Autocast: the weight rides on a bfloat16 loss, the gradients are float32."""
    parameter = nn.Parameter(torch.ones(4))
    accumulator = Accumulator(GivenWeight())
    for weight in (1001, 1003, 1005, 517):
        accumulator.backward(parameter.sum().bfloat16(), weight)
    stats = accumulator.finish([parameter])
    assert float(stats.weight) == 1001 + 1003 + 1005 + 517
    torch.testing.assert_close(parameter.grad, torch.ones(4), rtol=1e-6, atol=0)


def test_bfloat16_gradient_keeps_small_contributions() -> None:
    """LlamaFactory#9769: the scale of the sum stays that of one gradient."""
    parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    accumulator = Accumulator(GivenWeight())
    for _ in range(64):
        accumulator.backward(parameter.sum(), 3)
    accumulator.finish([parameter])
    torch.testing.assert_close(parameter.grad, torch.ones_like(parameter))


@pytest.mark.parametrize("weight", [1.0, 50_000, 1e9])
def test_large_weights_do_not_overflow_float16(weight: float) -> None:
    """GradientAccumulator#132: unnormalised sums overflow half precision."""
    parameter = nn.Parameter(torch.full((4,), 3.0, dtype=torch.float16))
    accumulator = Accumulator(GivenWeight())
    for _ in range(3):
        parameter.grad = None
        for share in (1, 0.5, 3):
            accumulator.backward((parameter * parameter).sum(), share * weight)
        accumulator.finish([parameter])
        torch.testing.assert_close(parameter.grad, torch.full_like(parameter, 6.0))


@pytest.mark.parametrize("checks", ["late", "now"])
def test_float16_sum_that_overflows_is_said(checks: Any) -> None:
    """The first window's r follows its first micro-batch, so that much heavier ones
    overflow, while every loss is finite."""
    parameter = nn.Parameter(torch.full((4,), 3.0, dtype=torch.float16))
    accumulator = Accumulator(GivenWeight(), checks=checks)
    for weight in (1, 60_000, 50_000):
        accumulator.backward((parameter * parameter).sum(), weight)
    if checks == "late":
        accumulator.finish([parameter])
    last = accumulator.check if checks == "late" else accumulator.finish
    given = () if checks == "late" else ([parameter],)
    with pytest.raises(TrainkitError, match=r"step 0 .*float16 is infinite or NaN"):
        last(*given)


def test_float16_sum_that_fits_is_not() -> None:
    parameter = nn.Parameter(torch.full((4,), 3.0, dtype=torch.float16))
    accumulator = Accumulator(GivenWeight())
    for weight in (60_000, 1, 50_000):
        accumulator.backward((parameter * parameter).sum(), weight)
    accumulator.finish([parameter])
    accumulator.check()
    torch.testing.assert_close(parameter.grad, torch.full_like(parameter, 6.0))


# ---- a gradient scaler ---------------------------------------------------------------


def scaled_training(
    fill: Callable[[nn.Module, Callable[[torch.Tensor], None]], Any],
    finish: Callable[[nn.Module], Any],
    *,
    steps: int = 12,
    unscale_first: bool,
) -> tuple[float, int, nn.Module]:
    """A loop under autocast; the scale at its end, and how many steps were taken."""
    net = fresh_net(torch.float32)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13, growth_interval=1000)
    taken = []
    optimizer.register_step_post_hook(lambda *_: taken.append(1))
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            fill(net, lambda loss: scaler.scale(loss).backward())
        if unscale_first:
            scaler.unscale_(optimizer)
        finish(net)
        nn.utils.clip_grad_norm_(net.parameters(), 1e9)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), len(taken), net


def autocast_loss(net: nn.Module, batch: Any) -> torch.Tensor:
    return token_loss(net, batch)


@pytest.mark.parametrize("unscale_first", [True, False])
@pytest.mark.parametrize("scale", [1, 50_000])
def test_scaler_loses_no_step_to_large_weights(scale: int, unscale_first: bool) -> None:
    """pytorch-lightning#9599, super-gradients#653, holocron#504."""
    accumulator = Accumulator(GivenWeight())

    def fill(net: nn.Module, backward: Any) -> None:
        for batch in CUT:
            weight = PerToken().weight(batch) * scale
            accumulator.backward(
                autocast_loss(net, batch), weight=weight, backward=backward
            )

    def finish(net: nn.Module) -> None:
        accumulator.finish(net.parameters())

    kept, taken, net = scaled_training(fill, finish, unscale_first=unscale_first)

    def whole(net: nn.Module, backward: Any) -> None:
        backward(autocast_loss(net, padded(SAMPLES)))

    plain = scaled_training(whole, lambda net: None, unscale_first=unscale_first)
    assert (kept, taken) == plain[:2] == (2.0**13, 12)
    assert deviation(net, plain[2], fresh_net(torch.float32)) <= 1e-2


def test_scaler_without_the_shared_scale_loses_steps() -> None:
    """The control, r = 1: weights of 50,000 overflow and the scale collapses."""

    def fill(net: nn.Module, backward: Any) -> None:
        for batch in CUT:
            backward(autocast_loss(net, batch) * 50_000)

    kept, taken, _ = scaled_training(fill, lambda net: None, unscale_first=True)
    assert taken < 12
    assert kept < 2.0**13
