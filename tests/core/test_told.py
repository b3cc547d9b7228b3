"""Windows that are announced: each loss is scaled exactly, and nothing is divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.core.common import (
    Toy,
    big_batch,
    cut,
    fresh_net,
    joined,
    padded,
    relative,
    run_open,
)
from tests.helpers import gradients, ragged_sequences, token_loss
from trainkit import Accumulator, PerToken, TrainkitError
from trainkit.core.told import weights_by_term

PARTS = cut(ragged_sequences(17), (5, 1, 8, 3))
WHOLE, _ = big_batch(fresh_net(), joined(PARTS))


@pytest.mark.parametrize("by_weights", [False, True])
def test_gradients_are_exact_before_the_window_is_finished(by_weights: bool) -> None:
    """No second pass over them; the weights themselves can be announced too."""
    net, accumulator = fresh_net(), Accumulator(PerToken())
    if by_weights:
        accumulator.expect(weights=weights_by_term({"": PerToken()}, PARTS))
    else:
        accumulator.expect(PARTS)
    for batch in PARTS:
        accumulator.backward(token_loss(net, batch))
    before = gradients(net)
    assert relative(before, WHOLE) <= 1e-12
    accumulator.finish(net.parameters())
    assert torch.equal(gradients(net), before)


@pytest.mark.filterwarnings("ignore:.*none of the window")
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize(
    ("weights", "reduction", "gradient"),
    [
        ((3, 0, 5), "mean", 3 / 8 + 500 / 8),
        ((3, 0, 5), "sum", 111 / 8),
        ((3, 0, 5), "total", 111),
        ((0, 0, 0), "mean", 0),
        ((0, 0, 0), "sum", 0),
        ((0, 0, 0), "total", 111),
    ],
)
def test_factors_are_shares_of_the_total(
    weights: Any, reduction: Any, gradient: float, as_tensor: bool
) -> None:
    """Of losses of 1, 10 and 100, whose factors can be read from their sum."""
    toy = Toy(reduction=reduction)
    own = [torch.tensor(w) if as_tensor else w for w in weights]
    toy.accumulator.expect(own)
    for loss in (1, 10, 100):
        toy.accumulator.backward(toy.parameter * loss)
    assert toy.gradient == gradient
    toy.finish()
    assert toy.gradient == gradient


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_are_not_rounded_to_a_loss_in_half_precision(dtype: Any) -> None:
    """bfloat16(1001) is 1000: such a window is divided at its end, by what the losses
    were really multiplied by."""
    toy, weights = Toy(dtype=torch.float32), [1001, 1003, 7]
    toy.accumulator.expect(weights)
    for _ in weights:
        toy.accumulator.backward(toy.parameter.to(dtype) * 1)
    toy.finish()
    assert toy.gradient == pytest.approx(1, rel=1e-6)
    shares = torch.tensor(weights) / sum(weights)
    assert float(shares.to(dtype).double().sum()) != pytest.approx(1, rel=1e-5)


def test_a_scaler_in_a_plain_loop_keeps_the_window_exact() -> None:
    net, scaler = fresh_net(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    accumulator = Accumulator(PerToken(), scaler=scaler)
    accumulator.expect(PARTS)
    for batch in PARTS:
        loss = token_loss(net, batch)
        accumulator.backward(loss, backward=lambda x: scaler.scale(x).backward())
    scaler.unscale_(optimizer)
    stats = accumulator.finish(optimizer)
    assert relative(gradients(net), WHOLE) <= 1e-6  # the scaler is in float32
    loss = token_loss(net, joined(PARTS)).detach()
    torch.testing.assert_close(stats.loss, loss)


# ---- what is refused -----------------------------------------------------------------


class Wrong(PerToken):
    """Weighs what it is told to."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        object.__setattr__(self, "given", given)

    def weight(self, batch: Any) -> Any:
        return self.given  # type: ignore[attr-defined]


def one_too_many(accumulator: Accumulator) -> None:
    accumulator.expect(PARTS[:1])
    run_open(accumulator, fresh_net(), PARTS[:2])


def too_few(accumulator: Accumulator) -> None:
    net = fresh_net()
    accumulator.expect(PARTS)
    run_open(accumulator, net, PARTS[:1])
    accumulator.finish(net.parameters())


def inside_a_window(accumulator: Accumulator) -> None:
    run_open(accumulator, fresh_net(), PARTS[:1])
    accumulator.expect(PARTS[1:])


def twice(accumulator: Accumulator) -> None:
    accumulator.expect(PARTS)
    accumulator.expect(PARTS)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (one_too_many, "to have 1 micro-batches on this rank, and another one came"),
        (too_few, "was to have 4 .* and had 1: its gradient"),
        (lambda a: a.expect([]), r"expect\(\): received no micro-batches"),
        (inside_a_window, r"expect\(\): must announce a window before it begins"),
        (twice, r"expect\(\): must announce a window before it begins"),
    ],
)
def test_another_window_than_announced_is_refused(wrong: Any, text: str) -> None:
    accumulator, net = Accumulator(PerToken()), fresh_net()
    with pytest.raises(TrainkitError, match=text):
        wrong(accumulator)
    accumulator.drop()
    run_open(accumulator, net, PARTS, told=True)  # which leaves no trace
    assert relative(gradients(net), WHOLE) <= 1e-12


def test_announcing_a_window_that_skips_micro_batches_is_refused() -> None:
    """What is skipped cannot be taken out of a total that is known."""
    with pytest.raises(TrainkitError, match="expect.*: nonfinite='skip' leaves"):
        Accumulator(PerToken(), nonfinite="skip").expect([padded(ragged_sequences(2))])


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "3", None])
def test_impossible_weights_are_refused(weight: Any) -> None:
    with pytest.raises(TrainkitError, match="weight: must be"):
        Accumulator(Wrong(weight)).expect(PARTS)
