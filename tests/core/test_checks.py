"""What must be known to stop: read one window late, or before the step."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.core.common import (
    GivenWeight,
    fresh_net,
    padded,
    relative,
    run_window,
)
from tests.helpers import gradients, ragged_sequences, token_loss
from trainkit import Accumulator, PerToken, TrainkitError

SAMPLES = ragged_sequences(6)
IGNORED = {"ids": torch.zeros(2, 5).long(), "labels": torch.full((2, 5), -100)}


def own_mean(net: nn.Module, batch: Any, reduction: str) -> Tensor:
    """A loss that divides by its own count: 0/0 where nothing counts."""
    logs = net(batch["ids"]).log_softmax(-1)
    counts = batch["labels"] != -100
    picked = logs.gather(-1, batch["labels"].clamp(min=0).unsqueeze(-1)).squeeze(-1)
    total = -(picked * counts).sum()
    return total / counts.sum() if reduction == "mean" else total


class Toy:
    """One parameter, and windows of one micro-batch: loss and weight as told."""

    def __init__(self, **options: Any) -> None:
        self.parameter = nn.Parameter(torch.ones(()))
        self.accumulator = Accumulator(GivenWeight(), **options)

    def window(self, *pairs: tuple[Any, Any]) -> Any:
        self.parameter.grad = None
        for loss, weight in pairs:
            self.accumulator.backward(self.parameter * loss, weight)
        return self.accumulator.finish([self.parameter])


# ---- nothing to count ----------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_ignored_micro_batch_equals_its_absence(reduction: Any, place: int) -> None:
    """Composer, torchtune#1875: a mean over nothing is NaN, and NaN * 0 is NaN."""
    cut: list[Any] = [padded(SAMPLES[:2]), padded(SAMPLES[2:])]
    net, reference = fresh_net(), fresh_net()
    expected = run_window(reference, cut, PerToken())
    cut.insert(place, IGNORED)
    accumulator = Accumulator(PerToken(loss_reduction=reduction), checks="now")
    stats = run_window(net, cut, accumulator)
    assert relative(gradients(net), gradients(reference)) <= 1e-12
    torch.testing.assert_close(stats.loss, expected.loss, rtol=1e-12, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ignored_window_equals_a_zero_gradient_said_once(reduction: Any) -> None:
    """Automodel#3797: zeros, not None and not NaN, and a word about it."""
    net = fresh_net()
    accumulator = Accumulator(PerToken(loss_reduction=reduction), checks="now")
    text = "optimizer step 0 .*none of the window's 2 micro-batches.*Said once"
    with pytest.warns(UserWarning, match=text):
        stats = run_window(net, [IGNORED, IGNORED], accumulator)
    assert all(p.grad is not None and not p.grad.any() for p in net.parameters())
    assert float(stats.loss) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_window(net, [IGNORED], accumulator)
        run_window(net, [padded(SAMPLES)], accumulator)
    assert gradients(net).abs().sum() > 0


@pytest.mark.filterwarnings("ignore:.*none of the window")
def test_window_after_an_ignored_one_equals_big_batch() -> None:
    """The shared scale keeps its last value where there is none to take."""
    accumulator = Accumulator(PerToken())
    for first in ([IGNORED], [padded(SAMPLES)], [IGNORED, IGNORED]):
        net, reference = fresh_net(), fresh_net()
        run_window(net, first, accumulator)
        net.zero_grad()
        run_window(
            net, [padded(SAMPLES[:4]), IGNORED, padded(SAMPLES[4:])], accumulator
        )
        token_loss(reference, padded(SAMPLES)).backward()
        assert relative(gradients(net), gradients(reference)) <= 1e-12


def test_own_mean_over_nothing_is_flagged_with_what_to_do() -> None:
    """llama-cookbook#133. Its gradient is NaN, which no weight can undo."""
    net = fresh_net()
    accumulator = Accumulator(PerToken())
    steps = torch.optim.SGD(net.parameters(), lr=0.1)
    run_window(net, [IGNORED, padded(SAMPLES)], accumulator, own_mean)
    steps.step()
    with pytest.raises(TrainkitError, match=r"clamp\(min=1\).*loss_reduction='sum'"):
        run_window(net, [padded(SAMPLES)], accumulator, own_mean)


@pytest.mark.parametrize("cut", [[IGNORED], [IGNORED, padded(SAMPLES)]])
def test_own_mean_over_nothing_is_refused_before_the_step_if_asked(cut: Any) -> None:
    accumulator = Accumulator(PerToken(), checks="now")
    with pytest.raises(TrainkitError, match=r"step 0 .*clamp\(min=1\)"):
        run_window(fresh_net(), cut, accumulator, own_mean)


def test_own_mean_over_nothing_in_the_last_window_is_found() -> None:
    """Its step is taken, and no loss comes after it that would be NaN."""
    net = fresh_net()
    accumulator = Accumulator(PerToken())
    steps = torch.optim.SGD(net.parameters(), lr=0.1)
    run_window(net, [IGNORED, padded(SAMPLES)], accumulator, own_mean)
    steps.step()
    with pytest.raises(TrainkitError, match=r"step 0 .*clamp\(min=1\)"):
        accumulator.check()


def test_own_sum_over_nothing_equals_its_absence() -> None:
    net, reference = fresh_net(), fresh_net()
    accumulator = Accumulator(PerToken(loss_reduction="sum"), checks="now")
    run_window(net, [IGNORED, padded(SAMPLES)], accumulator, own_mean)
    token_loss(reference, padded(SAMPLES)).backward()
    assert relative(gradients(net), gradients(reference)) <= 1e-12


# ---- weights that cannot be ----------------------------------------------------------


@pytest.mark.parametrize("weight", [-1, -0.5, float("nan"), float("inf")])
def test_impossible_number_is_refused_at_once(weight: float) -> None:
    with pytest.raises(TrainkitError, match="finite and not negative, received"):
        Toy().window((1.0, weight))


@pytest.mark.parametrize("weight", [-1, -0.5, float("nan"), float("inf")])
def test_impossible_tensor_is_flagged_one_window_late(weight: float) -> None:
    toy = Toy()
    toy.window((1.0, 1))
    toy.window((1.0, torch.tensor(5.0)), (1.0, torch.tensor(weight)), (1.0, 2))
    text = r"optimizer step 1 \(counted from 0\), rank 0: .*finite and not negative"
    with pytest.raises(TrainkitError, match=text):
        toy.window((1.0, 1))


@pytest.mark.parametrize("weight", [-1, -0.5, float("nan"), float("inf")])
def test_impossible_tensor_is_refused_before_the_step_if_asked(weight: float) -> None:
    with pytest.raises(TrainkitError, match="optimizer step 0 .*rank 0: .*negative"):
        Toy(checks="now").window((1.0, torch.tensor(weight)), (1.0, 100))


@pytest.mark.parametrize(
    ("weight", "text"),
    [
        (torch.ones(2), r"one number for a micro-batch, received .* \[2\]"),
        ("3", "a number or a 0-d tensor, received str"),
        (None, "a number or a 0-d tensor, received NoneType"),
    ],
)
def test_weight_that_is_no_number_is_refused(weight: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        Toy().window((1.0, weight))


# ---- losses that are not finite ------------------------------------------------------

BAD = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("loss", BAD)
def test_nonfinite_loss_is_flagged_one_window_late(loss: float) -> None:
    toy = Toy()
    toy.window((1.0, 1), (loss, 1), (2.0, 1))
    with pytest.raises(TrainkitError, match="optimizer step 0 .*rank 0: the loss must"):
        toy.window((1.0, 1))


@pytest.mark.parametrize("loss", BAD)
def test_nonfinite_loss_is_refused_before_the_step_if_asked(loss: float) -> None:
    toy = Toy(checks="now")
    toy.window((1.0, 1))
    with pytest.raises(TrainkitError, match="optimizer step 1 .*No step was taken"):
        toy.window((1.0, 1), (loss, 1))


def test_nonfinite_loss_is_left_to_a_scaler_if_allowed() -> None:
    toy = Toy(checks="now", nonfinite="allow")
    assert not toy.window((1.0, 1), (float("inf"), 1)).loss.isfinite()
    assert toy.window((3.0, 2)).loss == 3


@pytest.mark.parametrize("loss", BAD)
def test_nonfinite_micro_batch_is_skipped_with_its_weight_if_asked(loss: float) -> None:
    """optax's skip_not_finite, for each micro-batch."""
    toy = Toy(checks="now", nonfinite="skip")
    stats = toy.window((3.0, 1), (loss, 50), (6.0, 2))
    assert (float(stats.loss), float(stats.weight)) == (5.0, 3.0)
    assert float(toy.parameter.grad) == 5.0  # type: ignore[arg-type]


def test_window_of_skipped_micro_batches_leaves_no_gradient_and_says_so() -> None:
    toy = Toy(checks="now", nonfinite="skip")
    with pytest.warns(UserWarning, match="none of the window's 2 micro-batches"):
        toy.window((float("nan"), 1), (float("nan"), 1))
    assert toy.parameter.grad is None


@pytest.mark.parametrize("option", ["checks", "nonfinite"])
def test_unknown_check_is_refused(option: str) -> None:
    with pytest.raises(TrainkitError, match=f"{option}: must be one of .*'never'"):
        Toy(**{option: "never"})
