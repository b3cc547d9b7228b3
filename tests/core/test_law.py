"""The law: however a batch is cut, its gradient and loss are those of the whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.core.common import (
    CASES,
    Toy,
    average_window,
    big_batch,
    cut,
    fresh_net,
    joined,
    padded,
    relative,
    run_window,
)
from tests.helpers import (
    NAIVE,
    OPTIMIZERS,
    TOLERANCE,
    deviation,
    gradients,
    ragged_sequences,
)
from trainkit import Accumulator, PerSample, PerToken, Uniform

SAMPLES = ragged_sequences(40, longest=30)
RAGGED = cut(SAMPLES, (1, 3, 26, 10))


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


# ---- one window ----------------------------------------------------------------------

REDUCTIONS = ("mean", "sum", "total")


WINDOWS = [
    *((c, torch.float64, r, t) for c in CASES for r in REDUCTIONS for t in (0, 1)),
    *(  # the other values take turns
        (case, dtype, REDUCTIONS[(row + column) % 3], (row + column) % 2)
        for row, case in enumerate(CASES)
        for column, dtype in enumerate([*TOLERANCE][1:])
    ),
]


@pytest.mark.parametrize(("case", "dtype", "reduction", "told"), WINDOWS, ids=str)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(micro_batches=cuts())
def test_any_cut_equals_big_batch(
    case: str, dtype: torch.dtype, reduction: Any, told: int, micro_batches: Any
) -> None:
    """pytorch-lightning#20350, transformers#34191: ragged micro-batches. What grows by
    their number, or forgets its normaliser: transformers#35856, #43595, #47688,
    axolotl#2262, fastai#3023, TRL#4935, #5828. A sum follows the mean; a total stays a
    sum."""
    make, loss, _ = CASES[case]
    net, reference = fresh_net(dtype), fresh_net(dtype)
    strategy = make(loss_reduction=reduction)
    stats = run_window(net, micro_batches, strategy, loss, told=bool(told))
    of_whole = "sum" if reduction == "total" else "mean"
    gradient, value = big_batch(reference, joined(micro_batches), loss, of_whole)
    near = TOLERANCE[dtype]
    assert relative(gradients(net), gradient) <= near
    torch.testing.assert_close(stats.loss, value.double(), rtol=near, atol=0)
    assert int(stats.num_micro_batches) == len(micro_batches)


@pytest.mark.parametrize("case", CASES)
def test_plain_averages_and_wrong_weights_differ_from_big_batch(case: str) -> None:
    """The control. The weight must be the loss's denominator (mmsegmentation#546)."""
    _, loss, wrong = CASES[case]
    gradient, _ = big_batch(fresh_net(), joined(RAGGED), loss)
    average = average_window(fresh_net(), RAGGED, loss)
    assert relative(average, gradient) > NAIVE
    net = fresh_net()
    run_window(net, RAGGED, wrong, loss)
    assert relative(gradients(net), gradient) > NAIVE
    uniform = fresh_net()
    run_window(uniform, RAGGED, Uniform(), loss)
    assert relative(gradients(uniform), average) <= 1e-12  # what its name says


@pytest.mark.parametrize("sizes", [(8,), (3, 3, 2)], ids=str)
def test_sum_is_divided_and_differs_from_a_total(sizes: Any) -> None:
    """What the option says: even a window of one micro-batch is divided."""
    net, batches = fresh_net(), cut(SAMPLES, sizes)
    run_window(net, batches, PerSample(loss_reduction="sum"))
    total, _ = big_batch(fresh_net(), joined(batches), reduction="sum")
    assert relative(gradients(net), total) == pytest.approx(1 - 1 / 8)


def test_constant_denominator_equals_that_of_the_whole() -> None:
    """allenai/open-instruct#1137, fw-ai/cookbook#200: it is no mean over what is in the
    batch, so that each of three micro-batches weighs a third of it."""
    toy = Toy(reduction="sum")
    toy.window((1, 64 / 3), (10, 64 / 3), (100, 64 / 3))
    assert toy.gradient == pytest.approx(111 / 64, rel=1e-14)


# ---- several windows -----------------------------------------------------------------


@settings(max_examples=10, deadline=None, derandomize=True)
@given(windows=st.lists(st.tuples(cuts(), st.booleans()), min_size=2, max_size=5))
def test_windows_in_a_row_equal_big_batches(windows: Any) -> None:
    """Announced or not. The shared scale r moves with earlier windows, and leaves no
    trace; the total is the optimizer window's own (trl#6024), and nobody else's
    (torchtune#1917)."""
    net, accumulator = fresh_net(), Accumulator(PerToken())
    for micro_batches, told in windows:
        net.zero_grad()
        run_window(net, micro_batches, accumulator, told=told)
        gradient, _ = big_batch(fresh_net(), joined(micro_batches))
        assert relative(gradients(net), gradient) <= 1e-10


MICRO_BATCH, WINDOW = 4, 4
TRAINED = SAMPLES[:38]  # a short last batch and a short last window


def slices(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[i : i + size] for i in range(0, len(items), size))


def train(
    way: str, case: str, reduction: Any, dtype: torch.dtype, how: dict[str, Any]
) -> tuple[nn.Module, int]:
    """A plain loop: gradients, clipping, step; and how many windows were closed."""
    make, loss, _ = CASES[case]
    net, clip = fresh_net(dtype), how.get("clip")
    accumulator = Accumulator(make(loss_reduction=reduction))
    steps = OPTIMIZERS[how["optimizer"]](net.parameters())
    for samples in [*slices(TRAINED, MICRO_BATCH * WINDOW)] * how["epochs"]:
        steps.zero_grad()
        for part in slices(samples, MICRO_BATCH) if way != "whole" else [samples]:
            batch = padded(part)
            if way in ("whole", "averages"):
                share = 1 if way == "whole" else WINDOW
                (loss(net, batch, "mean") / share).backward()
            else:
                accumulator.backward(loss(net, batch, reduction), batch)
            if way == "clipped before the division":
                nn.utils.clip_grad_norm_(net.parameters(), clip or torch.inf)
        if way not in ("whole", "averages"):
            accumulator.finish(steps)
        if clip is not None and way != "clipped before the division":
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        steps.step()
    return net, accumulator.num_windows


ROWS: list[tuple[Any, ...]] = [  # every pair of values
    ("tokens", "sgd", "mean", None, 2),
    ("tokens", "momentum", "sum", 0.3, 2),
    ("tokens", "adamw", "sum", None, 1),
    ("samples", "sgd", "sum", 0.3, 1),
    ("samples", "momentum", "mean", None, 1),
    ("samples", "adamw", "mean", 0.3, 2),
    ("class weights", "sgd", "mean", 0.3, 1),
    ("class weights", "momentum", "sum", None, 2),
    ("class weights", "adamw", "mean", None, 1),
]
# Adam's first steps are signs, which rounding turns round.
NARROW_ROWS = [(*row, torch.float32) for row in ROWS if row[1] != "adamw"]


@pytest.mark.parametrize(
    ("case", "optimizer", "reduction", "clip", "epochs", "dtype"),
    [*((*row, torch.float64) for row in ROWS), *NARROW_ROWS],
    ids=str,
)
def test_training_equals_big_batches_and_the_naive_way_differs(
    case: str, optimizer: str, reduction: Any, clip: Any, epochs: int, dtype: Any
) -> None:
    """pytorch-lightning#19987 (short window), keras#20241 (short batch), keras#19990
    and super-gradients#653 (clipping, decay and moments once a step)."""
    how = {"optimizer": optimizer, "clip": clip, "epochs": epochs}
    whole, _ = train("whole", case, "mean", dtype, how)
    net, num_windows = train("trainkit", case, reduction, dtype, how)
    assert deviation(net, whole, fresh_net(dtype)) <= TOLERANCE[dtype]
    assert num_windows == 3 * epochs  # counted steps: the ceiling
    naive = "averages" if clip is None else "clipped before the division"
    control, _ = train(naive, case, reduction, dtype, how)
    assert deviation(control, whole, fresh_net(dtype)) > NAIVE
