"""What a window was: its gradient and totals, exact, and what is said of it; what a
ledger of windows holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.core.common import (
    Toy,
    cut,
    fresh_net,
    read_nothing,
    relative,
    run_window,
)
from tests.helpers import gradients, ragged_sequences, token_loss
from tests.zoo.callbacks import SENT
from trainkit import Accumulator, PerToken, WindowStats
from trainkit.core.ledger import Ledger
from trainkit.core.window import COLUMNS, Window


@pytest.fixture(autouse=True, params=["in the host's memory", "on a device"])
def place(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where tensors are, as trainkit sees it: it reads those in the host's memory."""
    if request.param == "on a device":
        read_nothing(monkeypatch)
    return request.param


# ---- windows whose law can be told by heart ------------------------------------------

LARGE = [2**24 + 1, 1, 1, 3]
"""float32 cannot count past 16,777,216."""

ONE = torch.tensor(1.0, dtype=torch.bfloat16)
"""Stacked beside it, 1001 would become 1000."""

THREES = [3, 3.0, np.int64(3), np.float32(3), torch.tensor(3), torch.tensor([[3.0]])]
BFLOAT16: Any = {"dtype": torch.bfloat16}
FLOAT16: Any = {"dtype": torch.float16}
WINDOWS: list[tuple[list[tuple[Any, Any]], dict[str, Any]]] = [
    ([(8, 1), (2, 5), (3, 2)], {}),
    ([(torch.tensor([4]), 1), (8, 3)], {}),
    ([*zip((1, 0, 0, 0), LARGE, strict=True)], {}),
    ([*zip((1, 0, 0, 0), torch.tensor(LARGE), strict=True)], {}),
    ([(1, torch.tensor(1001)), (0, ONE), (0, torch.tensor([2.0])), (0, 0.5)], {}),
    *(([(1, three), (5, 1)], {}) for three in THREES),
    # LlamaFactory#9769: the scale of the sum stays that of one gradient.
    ([(1, 3)] * 64, BFLOAT16),
    # GradientAccumulator#132: unnormalised sums overflow half precision.
    *(([(6, w), (6, w / 2), (6, 3 * w)], FLOAT16) for w in (1, 50_000, 1e9)),
    # Nothing is known of the weights to come after a beginning of weight 0.
    ([(3, 0), (3, 100_000), (3, 60_000)], FLOAT16),
    ([(6, 60_000), (6, 1), (6, 50_000)], FLOAT16),
]


@pytest.mark.parametrize(("micro_batches", "options"), WINDOWS)
def test_windows_equal_the_law(micro_batches: Any, options: Any) -> None:
    """Also those that come after others: torchtune#1917, what was reduced once is not
    counted again. In half precision nothing overflows, and nothing is lost."""
    toy = Toy(checks="now", **options)
    pairs = [(float(x), float(w)) for x, w in micro_batches]
    weight = sum(w for _, w in pairs)
    loss = sum(x * w for x, w in pairs) / weight
    near = 1e-14 if toy.parameter.dtype == torch.float64 else 1e-3
    for _ in range(3):
        stats = toy.window(*micro_batches)
        assert isinstance(stats, WindowStats)
        assert stats.weight.dtype == torch.float64
        assert (stats.weight, stats.num_micro_batches) == (weight, len(micro_batches))
        assert toy.gradient == pytest.approx(loss, rel=near)
        assert float(stats.loss) == pytest.approx(loss, rel=near)
        toy.window((1, 100))


def test_a_full_window_after_a_short_one_does_not_overflow_float16() -> None:
    """r falls by a half at most: an epoch ends with a short window."""
    toy = Toy(checks="now", **FLOAT16)
    for weight in (2**16, 2**16, 1, 2**17):
        toy.window((6, weight))
        assert toy.gradient == 6


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


# ---- what is said of it --------------------------------------------------------------


def test_stats_show_how_much_micro_batches_differ() -> None:
    stats = Toy().window((8, 1), (2, 5), (3, 2))
    assert float(stats.imbalance) == 3 * 5 / 8  # the largest over the mean


def test_window_of_equal_weights_is_balanced() -> None:
    assert float(Toy().window((1, 3), (1, 3)).imbalance) == 1


def test_what_was_not_counted_is_unknown() -> None:
    none = Toy().window((1, 1), (1, 5))
    assert none.padding.isnan()
    assert none.samples == 0


def test_padding_equals_the_share_of_tokens_that_only_pad() -> None:
    toy = Toy()
    for padding, tokens in ((3, 10), (torch.tensor(1), 6)):
        toy.add(1, 1)
        toy.accumulator.window.count(padding=padding, tokens=tokens)
    assert float(toy.finish().padding) == 4 / 16


def test_numbers_on_the_host_stay_there_whatever_device_is_the_default() -> None:
    """A model on the CPU, beside others that a default puts elsewhere."""
    window = Window("mean")
    window.add(2.0, 123457, 123457)
    with torch.device("meta"):
        row = window.row(torch.device("cpu"))
    assert row.tolist() == window.row(torch.device("cpu")).tolist()


# ---- the ledger ----------------------------------------------------------------------


def windows(number: int, *, reduction: Any = "mean") -> list[WindowStats]:
    """Windows of three ranks."""
    generator = torch.Generator().manual_seed(number)
    made = []
    for _ in range(number):
        table = torch.rand(3, len(COLUMNS), generator=generator, dtype=torch.float64)
        made.append(WindowStats(table, table.sum(0), reduction))
    return made


def entered(made: list[WindowStats], ledger: Ledger | None = None) -> Ledger:
    ledger = Ledger() if ledger is None else ledger
    for stats in made:
        ledger.waiting.append((0, stats, True))
    return ledger


def numbers(ledger: Ledger) -> list[float]:
    account: Any = ledger.of()
    held = [float(account.weight), float(account.samples)]
    return [account.num_windows, *held, *account.extremes.tolist()]


def test_an_account_equals_sums_and_extremes_by_hand() -> None:
    made = windows(7)
    weights = [float(each.weight) for each in made]
    samples = [float(each.samples) for each in made]
    losses = [float(made[0].loss), float(made[-1].loss)]
    by_hand = [7, sum(weights), sum(samples), min(weights), max(weights), *losses]
    assert numbers(entered(made)) == pytest.approx(by_hand, rel=1e-15)


@pytest.mark.parametrize("again", SENT.values())
def test_a_copy_continues_alone(again: Callable[[Ledger], Ledger]) -> None:
    made = windows(9, reduction="total")
    whole = numbers(entered(made))
    ledger = entered(made[:4])
    before = numbers(ledger)
    continued = numbers(entered(made[4:], again(ledger)))
    assert continued == pytest.approx(whole, rel=1e-14)
    assert numbers(ledger) == before


def test_samples_are_unknown_after_a_window_that_counted_none() -> None:
    ledger = entered(windows(2))
    ledger.waiting.append((0, windows(1)[0], False))
    entered(windows(2), ledger)
    account: Any = ledger.of()
    assert math.isnan(account.samples)
    assert account.weight > 0


def test_an_optimizer_without_windows_has_no_account() -> None:
    assert entered(windows(2)).of(1) is None
