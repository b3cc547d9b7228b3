"""Narrow dtypes: no weight is rounded, nothing overflows, no step is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.core.common import (
    GivenWeight,
    Toy,
    cut,
    fresh_net,
    joined,
)
from tests.helpers import deviation, ragged_sequences, token_loss
from trainkit import Accumulator, PerToken, TrainkitError

PARTS = cut(ragged_sequences(16, longest=30), (1, 5, 10))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("divided_by", [1, 3])
def test_weight_1001_of_a_half_precision_loss_is_not_rounded(
    dtype: torch.dtype, divided_by: int
) -> None:
    """bfloat16(1001) is 1000: what was applied is what the window divides by, so equal
    micro-batches keep their gradient."""
    toy = Toy(dtype=dtype)
    for _ in range(4):
        loss = toy.parameter * 1 / divided_by
        toy.accumulator.weigh(loss, 1001, divided_by=divided_by)
        loss.backward()
    assert float(toy.finish().weight) == 4004
    assert toy.gradient == 1


@pytest.mark.parametrize("as_tensor", [False, True])
def test_half_precision_loss_on_float32_weights_equals_what_was_applied(
    as_tensor: bool,
) -> None:
    """Autocast: the weight rides on a bfloat16 loss, the gradients are float32."""
    toy = Toy(dtype=torch.float32)
    for weight in (1001, 1003, 1005, 517):
        given = torch.tensor(weight) if as_tensor else weight
        toy.accumulator.backward((toy.parameter * 1).bfloat16(), given)
    assert float(toy.finish().weight) == 1001 + 1003 + 1005 + 517
    assert toy.gradient == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("checks", ["late", "now"])
def test_float16_sum_that_overflows_is_said(checks: Any) -> None:
    """The first window's r follows its first micro-batch, so that much heavier ones
    overflow, while every loss is finite."""
    toy = Toy(dtype=torch.float16, checks=checks)
    if checks == "late":
        toy.window((6, 1), (6, 60_000), (6, 50_000))
    last: Any = toy.accumulator.check if checks == "late" else toy.window
    given = [] if checks == "late" else [(6, 1), (6, 60_000), (6, 50_000)]
    with pytest.raises(TrainkitError, match=r"step 0 .*float16 is infinite or NaN"):
        last(*given)


def test_float16_sum_that_overflows_is_left_to_a_scaler() -> None:
    toy = Toy(dtype=torch.float16, checks="now", nonfinite="allow")
    toy.window((6, 1), (6, 60_000_000))
    assert not toy.parameter.grad.isfinite()  # type: ignore[union-attr]


# ---- a gradient scaler ---------------------------------------------------------------


def scaled_training(
    way: str, *, scale: int = 1, unscale_first: bool = True, steps: int = 12
) -> tuple[float, int, nn.Module]:
    """A loop under autocast; the scale at its end, and how many steps were taken."""
    net = fresh_net(torch.float32)
    accumulator = Accumulator(GivenWeight(), nonfinite="allow")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13, growth_interval=1000)
    taken = []
    optimizer.register_step_post_hook(lambda *_: taken.append(1))

    def backward(loss: torch.Tensor) -> None:
        scaler.scale(loss).backward()

    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            for batch in PARTS if way != "whole" else [joined(PARTS)]:
                loss = token_loss(net, batch)
                if way == "trainkit":
                    weight = PerToken().weight(batch) * scale
                    accumulator.backward(loss, weight=weight, backward=backward)
                else:
                    backward(loss * scale)
        if unscale_first:
            scaler.unscale_(optimizer)
        if way == "trainkit":
            accumulator.finish(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1e9)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), len(taken), net


@pytest.mark.parametrize("unscale_first", [True, False])
@pytest.mark.parametrize("scale", [1, 50_000])
def test_scaler_loses_no_step_to_large_weights(scale: int, unscale_first: bool) -> None:
    """pytorch-lightning#9599, super-gradients#653, holocron#504."""
    how: Any = {"unscale_first": unscale_first}
    kept, taken, net = scaled_training("trainkit", scale=scale, **how)
    whole_kept, whole_taken, whole = scaled_training("whole", **how)
    assert (kept, taken) == (whole_kept, whole_taken) == (2.0**13, 12)
    assert deviation(net, whole, fresh_net(torch.float32)) <= 1e-2


def test_scaler_without_the_shared_scale_loses_steps() -> None:
    """The control, r = 1: weights of 50,000 overflow and the scale collapses."""
    kept, taken, _ = scaled_training("r = 1", scale=50_000)
    assert taken < 12
    assert kept < 2.0**13


def test_first_window_leaves_headroom_under_a_scaler() -> None:
    """Its first micro-batch may be light: an overflow would cost a step."""
    toy = Toy(dtype=torch.float16, nonfinite="allow")
    toy.add(600, 1)
    toy.add(600, 250)
    assert toy.gradient < 2**11
    toy.finish()
    assert toy.gradient == 600
