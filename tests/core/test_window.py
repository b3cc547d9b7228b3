"""What a window was: its totals, exact, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.core.common import Toy, cut, fresh_net, relative, run_window
from tests.helpers import gradients, ragged_sequences, token_loss
from trainkit import Accumulator, PerToken, WindowStats


def test_stats_equal_the_window() -> None:
    toy = Toy()
    stats = toy.window((8, 1), (2, 5), (3, 2), slots=4)
    assert isinstance(stats, WindowStats)
    assert (stats.weight, stats.num_micro_batches) == (8, 3)
    assert stats.weight.dtype == torch.float64
    assert float(stats.loss) == toy.gradient == (1 * 8 + 5 * 2 + 2 * 3) / 8
    assert float(stats.imbalance) == 3 * 5 / 8  # the largest over the mean
    assert stats.weights is not None
    assert stats.weights.tolist() == [1, 5, 2]
    shares = [1 / 8, 5 / 8, 2 / 8]
    assert stats.uniform_gap is not None
    gap = sum(abs(share - 1 / 3) for share in shares) / 2  # the total variation
    assert float(stats.uniform_gap) == pytest.approx(gap)


def test_window_of_equal_weights_is_balanced() -> None:
    stats = Toy().window((1, 3), (1, 3), slots=2)
    assert float(stats.imbalance) == 1
    assert float(stats.uniform_gap) == 0  # type: ignore[arg-type]


def test_what_was_not_kept_or_counted_is_unknown() -> None:
    none, one = Toy().window((1, 1), (1, 5)), Toy().window((1, 1), (1, 5), slots=1)
    assert (none.uniform_gap, none.weights) == (None, None)
    assert one.uniform_gap is not None
    assert one.uniform_gap.isnan()
    assert none.padding.isnan()
    assert none.samples == 0


def test_padding_equals_the_share_of_tokens_that_only_pad() -> None:
    toy = Toy()
    for padding, tokens in ((3, 10), (torch.tensor(1), 6)):
        toy.add(1, 1)
        toy.accumulator.window.count(padding=padding, tokens=tokens)
    assert float(toy.finish().padding) == 4 / 16


@pytest.mark.filterwarnings("ignore:.*none of the window")
def test_window_of_weight_zero_has_loss_zero() -> None:
    toy = Toy()
    stats = toy.window((float("nan"), 0), (1, 0))
    assert float(stats.loss) == float(stats.weight) == 0


# ---- exact totals --------------------------------------------------------------------


@pytest.mark.parametrize("as_tensor", [False, True])
def test_totals_beyond_2_to_24_are_exact(as_tensor: bool) -> None:
    """float32 cannot count past 16,777,216."""
    weights: list[Any] = [2**24 + 1, 1, 1, 3]
    assert torch.tensor(weights, dtype=torch.float32).sum() != sum(weights)
    if as_tensor:
        weights = [torch.tensor(weight) for weight in weights]
    toy = Toy()
    stats = toy.window(*zip((1, 0, 0, 0), weights, strict=True))
    assert int(stats.weight) == 2**24 + 6
    assert toy.gradient == pytest.approx((2**24 + 1) / (2**24 + 6), rel=1e-14)


def test_totals_of_windows_do_not_add_up() -> None:
    """torchtune#1917: what was reduced once is not counted again."""
    toy = Toy()
    for weight in (10, 10_000_000, 3):
        assert int(toy.window((2, weight)).weight) == weight
        assert toy.gradient == 2


def test_mixed_kinds_of_weights_equal_their_values() -> None:
    """Stacked beside a bfloat16, 1001 would become 1000."""
    one = torch.tensor(1.0, dtype=torch.bfloat16)
    kinds = [torch.tensor(1001), one, torch.tensor([2.0]), 4, 0.5]
    toy = Toy()
    stats = toy.window(*zip((1, 0, 0, 0, 0), kinds, strict=True))
    assert float(stats.weight) == 1008.5
    assert toy.gradient == pytest.approx(1001 / 1008.5, rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bfloat16])
def test_narrow_weight_times_a_divisor_equals_the_law(dtype: torch.dtype) -> None:
    """For a loop that divides by N: 8 * uint8(200) is 64."""
    toy = Toy()
    for weight, loss in ((100, 1), (50, 4)):
        divided = toy.parameter * loss / 8
        narrow = torch.tensor(weight, dtype=dtype)
        toy.accumulator.weigh(divided, narrow, divided_by=8)
        divided.backward()
    assert float(toy.finish().loss) == pytest.approx(2, rel=1e-12)
    assert toy.gradient == pytest.approx(2, rel=1e-12)


def test_buffers_that_are_filled_again_equal_their_first_values() -> None:
    """A CUDA graph writes each step's loss and count over the last one's."""
    toy, count = Toy(), torch.zeros((), dtype=torch.float64)
    for weight, value in ((1, 6), (3, 2)):
        count.fill_(weight)
        loss = toy.parameter * value
        toy.accumulator.backward(loss, count)
        loss.detach().zero_()
    stats = toy.finish()
    assert (float(stats.weight), float(stats.loss), toy.gradient) == (4, 3, 3)


def test_loss_of_shape_one_beside_a_scalar_equals_the_law() -> None:
    toy = Toy()
    toy.add(torch.tensor([4]), 1)
    toy.add(8, 3)
    assert float(toy.finish().loss) == toy.gradient == 7


@pytest.mark.parametrize("unit", [1e-30, 1e-3, 1e30])
def test_gradient_does_not_depend_on_the_unit_of_weights(unit: float) -> None:
    parts = cut(ragged_sequences(9), (2, 7))
    net, reference = fresh_net(), fresh_net()
    accumulator = Accumulator(PerToken())
    for batch in parts:
        weight = PerToken().weight(batch) * unit
        accumulator.backward(token_loss(net, batch), weight=weight)
    accumulator.finish(net.parameters())
    run_window(reference, parts, PerToken())
    assert relative(gradients(net), gradients(reference)) <= 1e-6
