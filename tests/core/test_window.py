"""What a window was: its totals, exact, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.core.common import GivenWeight, fresh_net, padded, run_window
from tests.helpers import gradients, ragged_sequences, token_loss
from trainkit import Accumulator, PerToken, WindowStats

CPU = torch.device("cpu")


def window_of(weights: Sequence[Any], losses: Sequence[Any], **options: Any) -> Any:
    """A window on one parameter whose gradient is the weighted mean of the losses."""
    parameter = nn.Parameter(torch.ones((), dtype=torch.float64))
    accumulator = Accumulator(GivenWeight())
    for weight, loss in zip(weights, losses, strict=True):
        accumulator.backward(parameter * loss, weight)
    return accumulator.finish([parameter], **options), parameter.grad


def test_stats_equal_the_window() -> None:
    stats, gradient = window_of([1, 5, 2], [8.0, 2.0, 3.0])
    assert isinstance(stats, WindowStats)
    assert stats.weight == 8
    assert stats.num_micro_batches == 3
    assert float(stats.loss) == float(gradient) == (1 * 8 + 5 * 2 + 2 * 3) / 8
    assert stats.weight.dtype == torch.float64


@pytest.mark.parametrize("as_tensor", [False, True])
def test_totals_beyond_2_to_24_are_exact(as_tensor: bool) -> None:
    """float32 cannot count past 16,777,216."""
    weights: list[Any] = [2**24 + 1, 1, 1, 3]
    assert torch.tensor(weights, dtype=torch.float32).sum() != sum(weights)
    if as_tensor:
        weights = [torch.tensor(weight) for weight in weights]
    stats, gradient = window_of(weights, [1.0, 0.0, 0.0, 0.0])
    assert int(stats.weight) == 2**24 + 6
    assert float(gradient) == pytest.approx((2**24 + 1) / (2**24 + 6), rel=1e-14)


def test_totals_of_many_large_windows_do_not_add_up() -> None:
    """torchtune#1917: what was reduced once is not counted again."""
    parameter = nn.Parameter(torch.ones((), dtype=torch.float64))
    accumulator = Accumulator(GivenWeight())
    for weight in (10, 10_000_000, 3):
        parameter.grad = None
        accumulator.backward(parameter * 2, weight)
        stats = accumulator.finish([parameter])
        assert (int(stats.weight), float(parameter.grad)) == (weight, 2.0)  # type: ignore[arg-type]


def test_mixed_kinds_of_weights_equal_their_values() -> None:
    """Stacked beside a bfloat16, 1001 would become 1000."""
    kinds = [
        torch.tensor(1001),
        torch.tensor(1.0, dtype=torch.bfloat16),
        torch.tensor([2.0]),
        4,
        0.5,
    ]
    stats, gradient = window_of(kinds, [1.0, 0.0, 0.0, 0.0, 0.0])
    assert float(stats.weight) == 1008.5
    assert float(gradient) == pytest.approx(1001 / 1008.5, rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bfloat16])
def test_narrow_weight_times_a_divisor_equals_the_law(dtype: torch.dtype) -> None:
    """For a loop that divides by N: 8 * uint8(200) is 64."""
    parameter = nn.Parameter(torch.ones((), dtype=torch.float64))
    accumulator = Accumulator(GivenWeight())
    for weight, loss in ((100, 1.0), (50, 4.0)):
        divided = parameter * loss / 8
        narrow = torch.tensor(weight, dtype=dtype)
        accumulator.weigh(divided, narrow, divided_by=8)
        divided.backward()
    stats = accumulator.finish([parameter])
    assert float(parameter.grad) == pytest.approx(2.0, rel=1e-12)  # type: ignore[arg-type]
    assert float(stats.loss) == pytest.approx(2.0, rel=1e-12)


def test_buffers_that_are_filled_again_equal_their_first_values() -> None:
    """A CUDA graph writes each step's loss and count over the last one's."""
    parameter = nn.Parameter(torch.ones((), dtype=torch.float64))
    accumulator = Accumulator(GivenWeight())
    count = torch.zeros((), dtype=torch.float64)
    for weight, value in ((1.0, 6.0), (3.0, 2.0)):
        count.fill_(weight)
        loss = parameter * value
        accumulator.backward(loss, count)
        loss.detach().zero_()
    stats = accumulator.finish([parameter])
    assert (float(stats.weight), float(stats.loss)) == (4.0, 3.0)
    assert float(parameter.grad) == 3.0  # type: ignore[arg-type]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_equals_big_batch_in_both_reductions(reduction: Any) -> None:
    """transformers#35204, trl#2456: what is reported, apart from the gradient."""
    samples = ragged_sequences(10)
    net = fresh_net()
    cut = [padded(samples[:2]), padded(samples[2:3]), padded(samples[3:])]
    stats = run_window(net, cut, PerToken(loss_reduction=reduction))
    expected = token_loss(net, padded(samples)).detach()
    torch.testing.assert_close(stats.loss, expected, rtol=1e-12, atol=0)


def test_loss_of_shape_one_beside_a_scalar_equals_the_law() -> None:
    parameter = nn.Parameter(torch.ones(1, dtype=torch.float64))
    accumulator = Accumulator(GivenWeight())
    accumulator.backward(parameter * 4, 1)
    accumulator.backward((parameter * 8).sum(), 3)
    stats = accumulator.finish([parameter])
    assert float(stats.loss) == float(parameter.grad) == 7.0  # type: ignore[arg-type]


def test_imbalance_equals_largest_share_times_number() -> None:
    assert float(window_of([2, 2, 2], [1.0] * 3)[0].imbalance) == 1
    assert float(window_of([1, 5, 2], [1.0] * 3)[0].imbalance) == 3 * 5 / 8


def test_uniform_gap_equals_total_variation() -> None:
    stats, _ = window_of([1, 5, 2], [1.0] * 3, slots=4)
    shares = [1 / 8, 5 / 8, 2 / 8]
    assert float(stats.uniform_gap) == pytest.approx(
        sum(abs(s - 1 / 3) for s in shares) / 2
    )
    assert stats.weights.tolist() == [1, 5, 2]
    assert float(window_of([3, 3], [1.0] * 2, slots=2)[0].uniform_gap) == 0


def test_uniform_gap_without_all_weights_is_unknown() -> None:
    assert window_of([1, 5], [1.0] * 2)[0].uniform_gap is None
    assert window_of([1, 5], [1.0] * 2)[0].weights is None
    assert window_of([1, 5], [1.0] * 2, slots=1)[0].uniform_gap.isnan()


def test_padding_equals_the_share_of_tokens_that_only_pad() -> None:
    parameter = nn.Parameter(torch.ones(()))
    accumulator = Accumulator(GivenWeight())
    for padding, tokens in ((3, 10), (torch.tensor(1), 6)):
        accumulator.backward(parameter * 1, 1)
        accumulator.window.count(padding=padding, tokens=tokens)
    assert float(accumulator.finish([parameter]).padding) == 4 / 16
    assert window_of([1], [1.0])[0].padding.isnan()


@pytest.mark.filterwarnings("ignore:.*none of the window")
def test_reading_a_window_of_weight_zero_gives_loss_zero() -> None:
    stats, gradient = window_of([0, 0], [float("nan"), 1.0])
    assert float(stats.loss) == float(stats.weight) == 0
    assert gradient is not None


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
def test_gradient_does_not_depend_on_the_unit_of_weights(scale: float) -> None:
    samples = ragged_sequences(9)
    cut = [padded(samples[:2]), padded(samples[2:])]
    net, reference = fresh_net(), fresh_net()
    accumulator = Accumulator(GivenWeight())
    for batch in cut:
        weight = PerToken().weight(batch) * scale
        accumulator.backward(token_loss(net, batch), weight)
    accumulator.finish(net.parameters())
    run_window(reference, cut, PerToken())
    torch.testing.assert_close(gradients(net), gradients(reference), rtol=1e-6, atol=0)
