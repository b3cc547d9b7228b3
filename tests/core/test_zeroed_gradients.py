"""Gradients that are zeroed inside a window are gone: refused, whoever does it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.core.common import (
    IGNORED,
    Toy,
    big_batch,
    cut,
    fresh_net,
    joined,
    relative,
    token_losses,
)
from tests.core.conftest import OnRanks
from tests.helpers import NAIVE, TOLERANCE, TokenNet, gradients, ragged_sequences
from trainkit import Accumulator, PerSample, PerToken, TrainkitError

EXACT = TOLERANCE[torch.float64]
PARTS = cut(ragged_sequences(9), (3, 3, 3))
WHOLE, _ = big_batch(fresh_net(), joined(PARTS))
GONE = r"the gradients of the \d micro-batches in it are gone"


def loss_of(net: nn.Module, batch: Any) -> torch.Tensor:
    """The mean over tokens; 0 if nothing counts."""
    return token_losses(net, batch).sum() / (batch["labels"] != -100).sum().clamp(1)


def run(
    between: Callable[[Any, Any], Any],
    *,
    after: int | None = None,
    windows: int = 1,
    told: bool = False,
    shown: bool = False,
    parts: Any = PARTS,
) -> TokenNet:
    """Windows in whose last one something is done after a pass, or after each."""
    net = fresh_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    accumulator = Accumulator(PerToken(), module=net if shown else None)
    for window in range(windows):
        optimizer.zero_grad()
        if told:
            accumulator.expect(parts)
        for number, part in enumerate(parts, 1):
            accumulator.backward(loss_of(net, part), part)
            if after in (number, None) and window + 1 == windows:
                between(net, optimizer)
        accumulator.finish(optimizer)
    return net


ZEROINGS: dict[str, Callable[[Any, Any], Any]] = {
    "optimizer": lambda net, optimizer: optimizer.zero_grad(),
    "optimizer, in place": lambda net, opt: opt.zero_grad(set_to_none=False),
    "module": lambda net, optimizer: net.zero_grad(),
    "module, in place": lambda net, _: net.zero_grad(set_to_none=False),
    "by hand": lambda net, _: [p.grad.zero_() for p in net.parameters()],
    "replaced": lambda net, _: [
        setattr(p, "grad", torch.zeros_like(p)) for p in net.parameters()
    ],
}
TURNS = cycle([(1, 1, 0), (2, 0, 0), (2, 1, 0), (1, 0, 0), (1, 0, 1)])


@pytest.mark.parametrize(
    ("zeroing", "after", "windows", "shown", "told"),
    [  # each zeroing at each place; the other values take turns
        (zeroing, after, *next(TURNS)) for zeroing in ZEROINGS for after in (1, 2, 3)
    ],
)
def test_zeroing_inside_a_window_is_refused(
    zeroing: str, after: int, windows: int, shown: int, told: int
) -> None:
    """Also in a plain loop's first window, and after its last micro-batch."""
    how: Any = {"windows": windows, "shown": bool(shown), "told": bool(told)}
    with pytest.raises(TrainkitError, match=GONE):
        run(ZEROINGS[zeroing], after=after, **how)


def zeroed_over_ddp(rank: int, world_size: int) -> str:
    ddp = DDP(fresh_net())
    accumulator = Accumulator(PerToken(), module=ddp)
    with ddp.no_sync():
        accumulator.backward(loss_of(ddp, PARTS[0]), PARTS[0])
    ddp.zero_grad(set_to_none=False)
    with pytest.raises(TrainkitError) as error:
        accumulator.backward(loss_of(ddp, PARTS[1]), PARTS[1])
    return str(error.value)


def test_zeroing_under_ddp_is_refused(on_ranks: OnRanks) -> None:
    for text in on_ranks(zeroed_over_ddp, 2):
        assert "the gradients of the 1 micro-batches in it are gone" in text


# ---- what is no zeroing --------------------------------------------------------------


def nothing(net: Any, optimizer: Any) -> None: ...


def mended(net: Any, optimizer: Any) -> None:
    for p in net.parameters():
        p.grad.nan_to_num_()


def clipped(net: Any, optimizer: Any) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), 1e9)


def masked(net: Any, optimizer: Any) -> None:
    net.embed.weight.grad[0] = 0


@pytest.mark.parametrize(
    ("between", "how"),
    [
        (nothing, {"windows": 3}),  # between two windows, zeroing is as ever
        (mended, {"after": 1}),
        (clipped, {}),
        (clipped, {"parts": [IGNORED, *PARTS]}),  # zero, and was zero before
        (masked, {"after": 3}),
    ],
)
def test_gradients_that_are_written_into_alike_equal_the_big_batch(
    between: Any, how: Any
) -> None:
    """Whatever is written into gradients is no zeroing, and a warning is an error."""
    net, expected = run(between, **how), fresh_net()
    loss_of(expected, joined(PARTS)).backward()
    if between is masked:
        masked(expected, None)
    assert relative(gradients(net), gradients(expected)) <= EXACT


def test_zeroing_after_a_beginning_that_weighs_nothing_is_refused() -> None:
    with pytest.raises(TrainkitError, match=GONE):
        run(ZEROINGS["module, in place"], parts=[IGNORED, *PARTS])


@pytest.mark.parametrize("zeroes", [False, True])
def test_a_part_without_a_gradient_as_in_lora_is_no_zeroing(zeroes: bool) -> None:
    """B begins as zeros, so A's gradient is 0 in the first window."""
    torch.manual_seed(0)
    down, up = nn.Linear(4, 2), nn.Linear(2, 3)
    nn.init.zeros_(up.weight)
    nn.init.ones_(up.bias)
    lora = nn.Sequential(down, up).double()
    accumulator, rows = Accumulator(PerSample()), torch.randn(5, 4).double()
    gone = pytest.raises(TrainkitError, match=GONE)
    with gone if zeroes else contextlib.nullcontext():
        for part in rows.split(2):
            accumulator.backward(lora(part).square().mean(), part)
            lora.zero_grad() if zeroes else clipped(lora, None)
        accumulator.finish(lora.parameters())
        found = gradients(lora)
        lora.zero_grad()
        lora(rows).square().mean().backward()
        assert relative(found, gradients(lora)) <= EXACT


def test_zeroing_a_part_of_the_model_is_said_once() -> None:
    """It may be a mask, which is exact; a forgotten zero_grad() is not. What was zero
    before is known once somebody has written into gradients."""

    def zero_embedding(net: Any, optimizer: Any) -> None:
        net.embed.zero_grad(set_to_none=False)

    text = r"1 of its 3 gradients were written over"
    with pytest.warns(UserWarning, match=text) as caught:
        net = run(zero_embedding)
    assert len(caught) == 1
    assert relative(gradients(net), WHOLE) > NAIVE


def test_gradients_of_zeros_are_nobodys_doing() -> None:
    """They are read only where somebody wrote, and were not zero before."""
    toy = Toy()
    toy.window((0, 2), (0, 2))
    toy.parameter.grad = None
    toy.add(0, 2)
    toy.parameter.grad.add_(0)  # type: ignore[union-attr]
    with pytest.raises(TrainkitError, match=GONE):
        toy.add(0, 2)
    toy.accumulator.drop()
    toy.parameter.grad = None
    for _ in range(2):  # it is known by now that somebody writes
        toy.add(0, 2)
        toy.parameter.grad.add_(0)  # type: ignore[union-attr]
    toy.finish()
