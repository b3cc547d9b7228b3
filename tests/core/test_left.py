"""Gradients that are zeroed inside a window are gone: refused, whoever does it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.core.common import relative
from tests.helpers import TOLERANCE, TokenNet, gradients, pad, ragged_sequences
from trainkit import Accumulator, PerToken
from trainkit.core.left import Left
from trainkit.errors import TrainkitError

EXACT = TOLERANCE[torch.float64]
DATA = ragged_sequences(9)
PARTS = [pad(DATA[i : i + 3]) for i in (0, 3, 6)]
GONE = r"the gradients of the \d micro-batches in it are gone"


def loss_of(net: nn.Module, batch: Any) -> torch.Tensor:
    logits = net(batch["ids"]).flatten(0, 1)
    return nn.functional.cross_entropy(logits, batch["labels"].flatten())


def run(
    between: Callable[[Any, Any], Any],
    *,
    after: int = 1,
    windows: int = 1,
    told: bool = False,
    **options: Any,
) -> TokenNet:
    """Windows in whose last one something is done between two passes."""
    net = TokenNet(dtype=torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    given: Any = {k: net if value == "net" else value for k, value in options.items()}
    accumulator = Accumulator(PerToken(), **given)
    for window in range(windows):
        optimizer.zero_grad()
        if told:
            accumulator.expect(PARTS)
        for number, part in enumerate(PARTS, 1):
            accumulator.backward(loss_of(net, part), part)
            if number == after and window + 1 == windows:
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


@pytest.mark.parametrize("options", [{"module": "net"}, {}], ids=["module", "bare"])
@pytest.mark.parametrize("windows", [1, 2])
@pytest.mark.parametrize("after", [1, 2, 3])
@pytest.mark.parametrize("zeroing", ZEROINGS)
def test_zeroing_inside_a_window_is_refused(
    zeroing: str, after: int, windows: int, options: Any
) -> None:
    """Also in a plain loop's first window, and after its last micro-batch."""
    with pytest.raises(TrainkitError, match=GONE):
        run(ZEROINGS[zeroing], after=after, windows=windows, **options)


@pytest.mark.parametrize("zeroing", ZEROINGS)
def test_zeroing_inside_a_told_window_is_refused(zeroing: str) -> None:
    with pytest.raises(TrainkitError, match=GONE):
        run(ZEROINGS[zeroing], told=True)


def whole() -> torch.Tensor:
    net = TokenNet(dtype=torch.float64)
    loss_of(net, pad(DATA)).backward()
    return gradients(net)


def nothing(net: Any, optimizer: Any) -> None: ...


def mended(net: Any, optimizer: Any) -> None:
    for p in net.parameters():
        p.grad.nan_to_num_()


def masked(net: Any, optimizer: Any) -> None:
    net.embed.weight.grad[0] = 0


@pytest.mark.parametrize("between", [nothing, mended])
def test_gradients_that_are_looked_at_or_mended_equal_the_big_batch(
    between: Any,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = run(between)
    assert relative(gradients(net), whole()) <= EXACT


def test_rows_masked_after_each_pass_are_no_zeroing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = run(masked, after=3)
    expected = TokenNet(dtype=torch.float64)
    loss_of(expected, pad(DATA)).backward()
    masked(expected, None)
    assert relative(gradients(net), gradients(expected)) <= EXACT


def test_zeroing_a_part_of_the_model_is_said() -> None:
    """It may be a mask, which is exact; a forgotten zero_grad() is not."""
    with pytest.warns(UserWarning, match=r"1 of its 3 gradients were written over"):
        net = run(lambda net, _: net.embed.zero_grad(set_to_none=False))
    assert relative(gradients(net), whole()) > 1e-2


def test_between_windows_zeroing_is_as_ever() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = run(nothing, windows=3)
    assert relative(gradients(net), whole()) <= EXACT


def test_left_looks_at_numbers_only_where_somebody_wrote() -> None:
    p = nn.Parameter(torch.zeros(3))  # a gradient of zeros is nobody's doing
    p.grad = torch.zeros(3)
    left = Left([p, nn.Parameter(torch.ones(1))])
    assert len(left) == 1
    assert left.are_zeroed() is None
    p.grad.add_(0)
    found = left.are_zeroed()
    assert found is not None
    assert found.tolist() == [1]
