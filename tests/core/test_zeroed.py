"""Gradients that are zeroed inside a window are gone: refused, whoever does it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import nn

from tests.core.common import relative
from tests.helpers import TOLERANCE, TokenNet, gradients, pad, ragged_sequences
from trainkit import Accumulator, PerSample, PerToken
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
    after: int | None = 1,
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


NET = {"module": "net"}
TURNS = cycle([(1, NET), (2, {}), (2, NET), (1, {})])


@pytest.mark.parametrize(
    ("zeroing", "after", "windows", "options"),
    [  # each zeroing at each place sees both values of the others
        (zeroing, after, *next(TURNS))
        for zeroing in ZEROINGS
        for after in (1, 2, 3)
        for _ in range(2)
    ],
    ids=str,
)
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


def clip(net: nn.Module) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), 1e9)


def window_that_begins_with_nothing(zeroing: Callable[[nn.Module], None]) -> TokenNet:
    """A micro-batch without labels, then the others; something after each pass."""
    nothing = {**PARTS[0], "labels": torch.full_like(PARTS[0]["labels"], -100)}
    net = TokenNet(dtype=torch.float64)
    accumulator = Accumulator(PerToken())
    for part in (nothing, *PARTS):
        logits = net(part["ids"]).flatten(0, 1)
        total = nn.functional.cross_entropy(
            logits, part["labels"].flatten(), reduction="sum"
        )
        count = (part["labels"] != -100).sum().clamp(min=1)
        accumulator.backward(total / count, part)
        zeroing(net)
    accumulator.finish(net.parameters())
    return net


def test_gradients_that_were_zero_before_are_not_zeroed() -> None:
    """Clipped after each pass, as in `on_after_backward`."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = window_that_begins_with_nothing(clip)
    assert relative(gradients(net), whole()) <= EXACT
    with pytest.raises(TrainkitError, match=GONE):
        window_that_begins_with_nothing(lambda net: net.zero_grad(set_to_none=False))


@pytest.mark.parametrize("zeroing", [clip, nn.Module.zero_grad])
def test_a_part_without_a_gradient_as_in_lora_is_no_zeroing(zeroing: Any) -> None:
    """B begins as zeros, so A's gradient is 0 in the first window."""
    torch.manual_seed(0)
    down, up = nn.Linear(4, 2), nn.Linear(2, 3)
    nn.init.zeros_(up.weight)
    nn.init.ones_(up.bias)
    lora = nn.Sequential(down, up).double()
    accumulator, rows = Accumulator(PerSample()), torch.randn(5, 4).double()

    def window() -> None:
        for part in rows.split(2):
            accumulator.backward(lora(part).square().mean(1).sum() / len(part), part)
            zeroing(lora)
        accumulator.finish(lora.parameters())

    if zeroing is not clip:
        with pytest.raises(TrainkitError, match=GONE):
            window()
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        window()
    found = gradients(lora)
    lora.zero_grad()
    (lora(rows).square().mean(1).sum() / len(rows)).backward()
    assert relative(found, gradients(lora)) <= EXACT


def test_rows_masked_after_each_pass_are_no_zeroing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = run(masked, after=3)
    expected = TokenNet(dtype=torch.float64)
    loss_of(expected, pad(DATA)).backward()
    masked(expected, None)
    assert relative(gradients(net), gradients(expected)) <= EXACT


def test_zeroing_a_part_of_the_model_is_said() -> None:
    """It may be a mask, which is exact; a forgotten zero_grad() is not. What was zero
    before is known once somebody has written into gradients."""
    with pytest.warns(UserWarning, match=r"1 of its 3 gradients were written over"):
        net = run(zero_embedding, after=None)
    assert relative(gradients(net), whole()) > 1e-2


def zero_embedding(net: Any, optimizer: Any) -> None:
    net.embed.zero_grad(set_to_none=False)


def test_gradients_are_read_only_where_somebody_wrote() -> None:
    """A gradient of zeros is nobody's doing."""
    p = nn.Parameter(torch.zeros(3))
    for write, refused in ((lambda: None, False), (lambda: p.grad.add_(0), True)):  # type: ignore[union-attr]
        accumulator = Accumulator(PerSample())
        accumulator.backward((p * 0).sum(), weight=2)
        write()
        if refused:
            with pytest.raises(TrainkitError, match=GONE):
                accumulator.backward((p * 0).sum(), weight=2)
        else:
            accumulator.backward((p * 0).sum(), weight=2)
        p.grad = None


def test_between_windows_zeroing_is_as_ever() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = run(nothing, windows=3)
    assert relative(gradients(net), whole()) <= EXACT
