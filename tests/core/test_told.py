"""Windows that are told beforehand: each loss is scaled exactly, nothing divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.core.test_terms import ce_of, off
from tests.helpers import NAIVE, TokenNet, gradients, pad, ragged_sequences
from trainkit import Accumulator, PerSample, PerToken
from trainkit.core.division import Division
from trainkit.core.ranks import Ranks
from trainkit.core.told import Told, weights_by_term
from trainkit.errors import TrainkitError

SIZES = (5, 1, 8, 3)
SEQUENCES = ragged_sequences(sum(SIZES))


def parts(sizes: tuple[int, ...] = SIZES) -> list[dict[str, Tensor]]:
    stops = torch.tensor((0, *sizes)).cumsum(0).tolist()
    return [pad(SEQUENCES[a:b]) for a, b in zip(stops, stops[1:], strict=False)]


def whole_gradient() -> Tensor:
    net = TokenNet(dtype=torch.float64)
    ce_of(net, pad(SEQUENCES)).backward()
    return gradients(net)


def run_told(
    accumulator: Accumulator, net: TokenNet, given: Any = None, reduction: str = "mean"
) -> Any:
    given = parts() if given is None else given
    accumulator.expect(given)
    for batch in given:
        accumulator.backward(ce_of(net, batch, reduction))
    return accumulator.finish(net.parameters())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("sizes", [SIZES, (17,), (1,) * 17, (16, 1)], ids=str)
def test_told_window_equals_big_batch(sizes: tuple[int, ...], reduction: Any) -> None:
    net = TokenNet(dtype=torch.float64)
    accumulator = Accumulator(PerToken(loss_reduction=reduction))
    stats = run_told(accumulator, net, parts(sizes), reduction)
    assert off(gradients(net), whole_gradient()) <= 1e-12
    whole = TokenNet(dtype=torch.float64)
    expected = ce_of(whole, pad(SEQUENCES)).detach()
    torch.testing.assert_close(stats.loss, expected)
    assert int(stats.weight) == int((pad(SEQUENCES)["labels"] != -100).sum())
    assert int(stats.num_micro_batches) == len(sizes)


def test_told_window_equals_a_streamed_one() -> None:
    told, streamed = TokenNet(dtype=torch.float64), TokenNet(dtype=torch.float64)
    run_told(Accumulator(PerToken()), told)
    accumulator = Accumulator(PerToken())
    for batch in parts():
        accumulator.backward(ce_of(streamed, batch), batch)
    accumulator.finish(streamed.parameters())
    assert off(gradients(told), gradients(streamed)) <= 1e-12


def test_mean_of_means_differs() -> None:
    """Negative control."""
    net = TokenNet(dtype=torch.float64)
    for batch in parts():
        (ce_of(net, batch) / len(SIZES)).backward()
    assert off(gradients(net), whole_gradient()) > NAIVE


def test_gradients_are_exact_before_the_window_is_finished() -> None:
    """No second pass over them."""
    net = TokenNet(dtype=torch.float64)
    accumulator = Accumulator(PerToken())
    accumulator.expect(parts())
    for batch in parts():
        accumulator.backward(ce_of(net, batch))
    before = gradients(net)
    assert off(before, whole_gradient()) <= 1e-12
    accumulator.finish(net.parameters())
    assert torch.equal(gradients(net), before)


def test_windows_of_a_training_may_be_told_or_not() -> None:
    """One after another, with one accumulator; each is exact."""
    net, accumulator = TokenNet(dtype=torch.float64), Accumulator(PerToken())
    for tells in (True, False, True, True, False):
        if tells:
            run_told(accumulator, net)
        else:
            for batch in parts():
                accumulator.backward(ce_of(net, batch), batch)
            accumulator.finish(net.parameters())
        assert off(gradients(net), whole_gradient()) <= 1e-12
        net.zero_grad()


def test_weights_can_be_told_themselves() -> None:
    net, accumulator = TokenNet(dtype=torch.float64), Accumulator(PerToken())
    accumulator.expect(weights=weights_by_term({"": PerToken()}, parts()))
    for batch in parts():
        accumulator.backward(ce_of(net, batch))
    accumulator.finish(net.parameters())
    assert off(gradients(net), whole_gradient()) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_are_not_rounded_to_a_loss_in_half_precision(dtype: Any) -> None:
    """bfloat16(1001) is 1000: with losses in half precision the window is divided at
    its end, by what the losses were really multiplied by."""
    values = torch.tensor([0.7, -0.4, 0.2])
    weights = [1001, 1003, 7]
    found = torch.zeros(3, requires_grad=True)
    accumulator = Accumulator(PerSample())
    accumulator.expect(weights={"": weights})
    for i in range(3):
        loss = (found * values).to(dtype)[i]
        accumulator.backward(loss)
    accumulator.finish([found])
    gradient = values.to(dtype).float() * torch.tensor(weights) / sum(weights)
    assert found.grad is not None
    torch.testing.assert_close(found.grad, gradient, rtol=2e-2, atol=1e-4)


def test_a_scaler_in_a_plain_loop_keeps_the_window_exact() -> None:
    net, scaler = TokenNet(dtype=torch.float64), torch.amp.GradScaler("cpu")
    accumulator = Accumulator(PerToken(), scaler=scaler)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    accumulator.expect(parts())
    for batch in parts():
        accumulator.backward(
            ce_of(net, batch), backward=lambda loss: scaler.scale(loss).backward()
        )
    scaler.unscale_(optimizer)
    stats = accumulator.finish(optimizer)
    assert off(gradients(net), whole_gradient()) <= 1e-6  # the scaler is in float32
    torch.testing.assert_close(
        stats.loss, ce_of(TokenNet(dtype=torch.float64), pad(SEQUENCES)).detach()
    )


# ---- what is refused -----------------------------------------------------------------


def test_another_micro_batch_than_told_is_refused() -> None:
    net, accumulator = TokenNet(), Accumulator(PerToken())
    first, *_ = parts()
    accumulator.expect([first])
    accumulator.backward(ce_of(net, first))
    with pytest.raises(
        TrainkitError, match="to have 1 micro-batches on this rank, and"
    ):
        accumulator.backward(ce_of(net, first))


def test_fewer_micro_batches_than_told_are_refused() -> None:
    net, accumulator = TokenNet(), Accumulator(PerToken())
    first, *_ = given = parts()
    accumulator.expect(given)
    accumulator.backward(ce_of(net, first))
    with pytest.raises(TrainkitError, match="was to have 4 .* and had 1: its gradient"):
        accumulator.finish(net.parameters())
    accumulator.drop()
    net.zero_grad()
    run_told(accumulator, net)


def test_no_micro_batches_are_refused() -> None:
    with pytest.raises(TrainkitError, match=r"expect\(\): received no micro-batches"):
        Accumulator(PerToken()).expect([])


def test_telling_an_open_window_is_refused() -> None:
    net, accumulator = TokenNet(), Accumulator(PerToken())
    first, second, *_ = parts()
    accumulator.backward(ce_of(net, first), first)
    with pytest.raises(TrainkitError, match="expect"):
        accumulator.expect([second])


def test_telling_a_window_that_skips_micro_batches_is_refused() -> None:
    """What is skipped cannot be taken out of a total that is known."""
    with pytest.raises(TrainkitError, match="skip"):
        Accumulator(PerToken(), nonfinite="skip").expect(parts())


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "3", None])
def test_wrong_weights_are_refused(weight: Any) -> None:
    class Wrong(PerToken):
        def weight(self, batch: Any) -> Any:
            return weight

    with pytest.raises(TrainkitError, match="weight"):
        Accumulator(Wrong()).expect(parts())


# ---- the factors ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "reduction", "factors"),
    [
        ((3, 0, 5), "mean", [3 / 8, 0, 5 / 8]),
        ((3, 0, 5), "sum", [1 / 8] * 3),
        ((3, 0, 5), "total", [1] * 3),
        ((0, 0), "mean", [0, 0]),
        ((0, 0), "sum", [0, 0]),
    ],
)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_factors_are_shares_of_the_total(
    weights: Any, reduction: Any, factors: Any, as_tensor: bool
) -> None:
    own = [torch.tensor(w) if as_tensor else w for w in weights]
    told, loss = Told({"": own}, Ranks(), torch.device("cpu")), torch.ones(())
    division = Division(Ranks(), leaves_room=False, scaler=None)
    division.open(told, reduction, loss.device)
    found = [division.factor(loss, told.next_weights()[""], reduction, 1) for _ in own]
    assert [float(factor) for factor, _ in found] == factors
    assert division.scale(torch.zeros(10), reduction, 0) is None
