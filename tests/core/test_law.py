"""The law: however a batch is cut, its gradient and loss are those of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.common import (
    ByClass,
    Loss,
    average_window,
    big_batch,
    class_weighted_loss,
    fresh_net,
    padded,
    relative,
    run_window,
    sample_loss,
    smoothed_loss,
)
from tests.helpers import NAIVE, TOLERANCE, gradients, ragged_sequences, token_loss
from trainkit import AccumulationStrategy, Accumulator, PerSample, PerToken, Uniform

SAMPLES = ragged_sequences(40, longest=30)

CASES: dict[str, tuple[Any, Loss]] = {
    "tokens": (PerToken, token_loss),
    "samples": (PerSample, sample_loss),
    "class weights": (ByClass, class_weighted_loss),  # pytorch#72047
    "label smoothing": (PerToken, smoothed_loss),  # transformers#46731, #47261
}


@st.composite
def cuts(draw: st.DrawFn) -> list[dict[str, torch.Tensor]]:
    """Any of the samples, in any order, cut anywhere, padded anyhow."""
    order = draw(st.permutations(range(len(SAMPLES))))
    order = order[: draw(st.integers(1, len(SAMPLES)))]
    ends = draw(st.sets(st.integers(1, len(order)))) | {len(order)}
    starts = [0, *sorted(ends)]
    extra = draw(st.lists(st.integers(0, 9), min_size=len(ends), max_size=len(ends)))
    return [
        padded([SAMPLES[i] for i in order[a:b]], more)
        for a, b, more in zip(starts, sorted(ends), extra, strict=False)
    ]


def whole(micro_batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The same rows as one batch."""
    samples = []
    for batch in micro_batches:
        for ids, labels in zip(batch["ids"], batch["labels"], strict=True):
            counts = labels != -100
            samples.append((ids[counts], labels[counts]))
    return padded(samples)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(micro_batches=cuts())
def test_any_cut_equals_big_batch(
    case: str, reduction: Any, micro_batches: Any
) -> None:
    """pytorch-lightning#20350, transformers#34191: ragged micro-batches."""
    check_cut(case, reduction, torch.float64, micro_batches)


NARROW = [dtype for dtype in TOLERANCE if dtype != torch.float64]


@pytest.mark.parametrize(
    ("case", "dtype", "reduction"),
    [  # the reductions take turns: every pair of values
        (case, dtype, ["mean", "sum"][(row + column) % 2])
        for row, case in enumerate(CASES)
        for column, dtype in enumerate(NARROW)
    ],
    ids=str,
)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(micro_batches=cuts())
def test_cuts_of_narrow_dtypes_equal_big_batch(
    case: str, reduction: Any, dtype: torch.dtype, micro_batches: Any
) -> None:
    check_cut(case, reduction, dtype, micro_batches)


def check_cut(
    case: str, reduction: Any, dtype: torch.dtype, micro_batches: Any
) -> None:
    make, loss = CASES[case]
    net, reference = fresh_net(dtype), fresh_net(dtype)
    stats = run_window(net, micro_batches, make(loss_reduction=reduction), loss)
    gradient, value = big_batch(reference, whole(micro_batches), loss)
    assert relative(gradients(net), gradient) <= TOLERANCE[dtype]
    torch.testing.assert_close(
        stats.loss, value.double(), rtol=TOLERANCE[dtype], atol=0
    )
    assert int(stats.num_micro_batches) == len(micro_batches)


RAGGED_CUT = [SAMPLES[:1], SAMPLES[1:4], SAMPLES[4:30], SAMPLES[30:]]


@pytest.mark.parametrize("case", CASES)
def test_plain_averaging_differs_from_big_batch(case: str) -> None:
    """The control: without the weights, the same comparison fails."""
    _, loss = CASES[case]
    micro_batches = [padded(samples) for samples in RAGGED_CUT]
    found = average_window(fresh_net(), micro_batches, loss)
    gradient, _ = big_batch(fresh_net(), whole(micro_batches), loss)
    assert relative(found, gradient) > NAIVE


@pytest.mark.parametrize("wrong", [PerSample(), Uniform()], ids=["samples", "uniform"])
def test_wrong_weight_differs_from_big_batch(wrong: AccumulationStrategy) -> None:
    """The weight must be the loss's denominator (mmsegmentation#546)."""
    micro_batches = [padded(samples) for samples in RAGGED_CUT]
    net = fresh_net()
    run_window(net, micro_batches, wrong)
    gradient, _ = big_batch(fresh_net(), whole(micro_batches))
    assert relative(gradients(net), gradient) > NAIVE


def test_uniform_equals_plain_averaging() -> None:
    micro_batches = [padded(samples) for samples in RAGGED_CUT]
    net = fresh_net()
    run_window(net, micro_batches, Uniform())
    average = average_window(fresh_net(), micro_batches)
    assert relative(gradients(net), average) <= 1e-12


@settings(max_examples=10, deadline=None, derandomize=True)
@given(windows=st.lists(cuts(), min_size=2, max_size=5))
def test_windows_in_a_row_equal_big_batches(windows: Any) -> None:
    """The shared scale r moves with earlier windows, and leaves no trace; the total
    is the optimizer window's own (trl#6024), and nobody else's (torchtune#1917)."""
    net, accumulator = fresh_net(), Accumulator(PerToken())
    for micro_batches in windows:
        net.zero_grad()
        run_window(net, micro_batches, accumulator)
        gradient, _ = big_batch(fresh_net(), whole(micro_batches))
        assert relative(gradients(net), gradient) <= 1e-10
