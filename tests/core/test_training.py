"""Whole trainings in a plain loop equal those on big batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.core.common import (
    ByClass,
    Loss,
    class_weighted_loss,
    fresh_net,
    sample_loss,
)
from tests.helpers import (
    NAIVE,
    OPTIMIZERS,
    TOLERANCE,
    deviation,
    pad,
    ragged_sequences,
    token_loss,
)
from trainkit import Accumulator, PerSample, PerToken

SAMPLES = ragged_sequences(38)  # in fours, four a window: a short last batch and window
MICRO_BATCH, WINDOW = 4, 4

CASES: dict[str, tuple[Any, Loss]] = {
    "tokens": (PerToken, token_loss),
    "samples": (PerSample, sample_loss),
    "class weights": (ByClass, class_weighted_loss),
}


def slices(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[i : i + size] for i in range(0, len(items), size))


def train(
    net: nn.Module,
    fill_gradients: Callable[[Sequence[Any]], None],
    *,
    optimizer: str,
    clip: float | None,
    epochs: int,
) -> nn.Module:
    """A plain loop: gradients, clipping, step."""
    steps = OPTIMIZERS[optimizer](net.parameters())
    for _ in range(epochs):
        for samples in slices(SAMPLES, MICRO_BATCH * WINDOW):
            steps.zero_grad()
            fill_gradients(samples)
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            steps.step()
    return net


def by_big_batch(net: nn.Module, loss: Loss) -> Callable[[Sequence[Any]], None]:
    return lambda samples: loss(net, pad(samples), "mean").backward()


def by_accumulator(
    net: nn.Module, accumulator: Accumulator, loss: Loss
) -> Callable[[Sequence[Any]], None]:
    def fill(samples: Sequence[Any]) -> None:
        for part in slices(samples, MICRO_BATCH):
            batch = pad(part)
            value = loss(net, batch, accumulator.strategy.loss_reduction)
            accumulator.backward(value, batch)
        accumulator.finish(net.parameters())

    return fill


def by_average(net: nn.Module, loss: Loss) -> Callable[[Sequence[Any]], None]:
    def fill(samples: Sequence[Any]) -> None:
        for part in slices(samples, MICRO_BATCH):
            (loss(net, pad(part), "mean") / WINDOW).backward()

    return fill


@pytest.mark.parametrize(
    ("case", "optimizer", "reduction", "clip", "epochs"),
    [  # every pair of values
        ("tokens", "sgd", "mean", None, 2),
        ("tokens", "momentum", "sum", 0.3, 2),
        ("tokens", "adamw", "sum", None, 1),
        ("samples", "sgd", "sum", 0.3, 1),
        ("samples", "momentum", "mean", None, 1),
        ("samples", "adamw", "mean", 0.3, 2),
        ("class weights", "sgd", "mean", 0.3, 1),
        ("class weights", "momentum", "sum", None, 2),
        ("class weights", "adamw", "mean", 0.3, 2),
        ("class weights", "adamw", "sum", None, 1),
    ],
)
def test_training_equals_big_batch(
    case: str, reduction: Any, optimizer: str, clip: float | None, epochs: int
) -> None:
    """pytorch-lightning#19987 (short window), keras#20241 (short batch), keras#19990
    and super-gradients#653 (clipping, decay and moments once a step)."""
    make, loss = CASES[case]
    options: Any = {"optimizer": optimizer, "clip": clip, "epochs": epochs}
    start, net, reference = fresh_net(), fresh_net(), fresh_net()
    accumulator = Accumulator(make(loss_reduction=reduction))
    train(net, by_accumulator(net, accumulator, loss), **options)
    train(reference, by_big_batch(reference, loss), **options)
    assert deviation(net, reference, start) <= TOLERANCE[torch.float64]
    assert accumulator.num_windows == 3 * epochs  # counted steps: the ceiling


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("case", CASES)
def test_training_in_float32_equals_big_batch(case: str, clip: float | None) -> None:
    make, loss = CASES[case]
    options: Any = {"optimizer": "sgd", "clip": clip, "epochs": 2}
    start, net, reference = (fresh_net(torch.float32) for _ in range(3))
    train(net, by_accumulator(net, Accumulator(make()), loss), **options)
    train(reference, by_big_batch(reference, loss), **options)
    assert deviation(net, reference, start) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_training_by_averages_differs_from_big_batch(case: str, optimizer: str) -> None:
    """The control."""
    _, loss = CASES[case]
    options: Any = {"optimizer": optimizer, "clip": None, "epochs": 1}
    start, net, reference = fresh_net(), fresh_net(), fresh_net()
    train(net, by_average(net, loss), **options)
    train(reference, by_big_batch(reference, loss), **options)
    assert deviation(net, reference, start) > NAIVE


def test_clipping_before_the_division_differs_from_big_batch() -> None:
    """The control for super-gradients#653: clip what is not divided yet."""
    options: Any = {"optimizer": "sgd", "epochs": 1}
    start, net, reference = fresh_net(), fresh_net(), fresh_net()
    train(reference, by_big_batch(reference, token_loss), clip=0.3, **options)
    accumulator = Accumulator(PerToken())

    def clip_each(samples: Sequence[Any]) -> None:
        for part in slices(samples, MICRO_BATCH):
            batch = pad(part)
            accumulator.backward(token_loss(net, batch), batch)
            nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        accumulator.finish(net.parameters())

    train(net, clip_each, clip=None, **options)
    assert deviation(net, reference, start) > NAIVE
