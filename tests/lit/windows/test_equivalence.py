"""Training in micro-batches equals training with the big batch."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.helpers import NAIVE, TOLERANCE, deviation, ragged_sequences, trainer
from tests.lit.fronts import (
    EQUAL,
    LOSSES,
    RAGGED,
    WINDOW,
    Clip,
    Front,
    Mixed,
    Plain,
    Reduction,
    Run,
    big_batch,
    clip_options,
    make_strategy,
    merged,
    micro_batches,
    train,
)
from trainkit import AccumulationCallback, PerToken

SEQUENCES = ragged_sequences(40)
STRATEGIES = ["PerSample", "PerToken", "Uniform"]
FRONTS: list[Front] = ["mixin", "callback", "loop"]
OPTIMIZERS = ["sgd", "momentum", "adamw"]
REDUCTIONS: list[Reduction] = ["mean", "sum"]
CLIPS: list[Clip] = ["norm", "value", None]
SQUARE = [
    (strategy, FRONTS[j], OPTIMIZERS[(i + j) % 3], CLIPS[(i + 2 * j) % 3])
    for i, strategy in enumerate(STRATEGIES)
    for j in range(3)
]
"""Two orthogonal Latin squares: each pair of values of two columns stands once."""


def sizes_for(strategy: str) -> tuple[int, ...]:
    return EQUAL if strategy == "Uniform" else RAGGED


def data_for(strategy: str) -> tuple[Any, ...]:
    sizes = sizes_for(strategy)
    return SEQUENCES[: sum(sizes)], sizes, LOSSES[strategy]


@cache
def reference(
    strategy: str, optimizer: str, clip: Clip, dtype: torch.dtype = torch.float64
) -> Run:
    return big_batch(*data_for(strategy), optimizer=optimizer, clip=clip, dtype=dtype)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("strategy", "front", "optimizer", "clip"), SQUARE)
def test_every_front_equals_big_batch(
    strategy: str, front: Front, optimizer: str, clip: Clip, reduction: Reduction
) -> None:
    """Weights after one and after two epochs, and every window's loss, in float64."""
    run = train(
        front,
        make_strategy(strategy, reduction),
        *data_for(strategy),
        optimizer=optimizer,
        clip=clip,
    )
    expected = reference(strategy, optimizer, clip)
    assert max(run.deviations(expected)) <= TOLERANCE[torch.float64]
    assert run.losses == pytest.approx(expected.losses, rel=1e-9)


@pytest.mark.parametrize(
    ("strategy", "front", "clip", "reduction"),
    [
        (strategy, front, clip, REDUCTIONS[index % 2])
        for index, (strategy, front, _, clip) in enumerate(SQUARE)
    ],
)
def test_sgd_in_float32_equals_big_batch(
    strategy: str, front: Front, clip: Clip, reduction: Reduction
) -> None:
    run = train(
        front,
        make_strategy(strategy, reduction),
        *data_for(strategy),
        clip=clip,
        dtype=torch.float32,
    )
    expected = reference(strategy, "sgd", clip, torch.float32)
    assert max(run.deviations(expected)) <= TOLERANCE[torch.float32]
    assert run.losses == pytest.approx(expected.losses, rel=1e-4)


def fit_plain(strategy: str, optimizer: str, clip: Clip, accumulate: int) -> Plain:
    """Plain Lightning; with `accumulate=1` on the big batches."""
    sequences, sizes, loss = data_for(strategy)
    module = Plain(loss, optimizer=optimizer)
    cut = merged(sizes) if accumulate == 1 else sizes
    trainer(accumulate, **clip_options(clip)).fit(module, micro_batches(sequences, cut))
    return module


@pytest.mark.parametrize(
    ("strategy", "optimizer", "clip"),
    [
        (strategy, OPTIMIZERS[(i + j) % 3], clip)
        for i, strategy in enumerate(STRATEGIES)
        for j, clip in enumerate(CLIPS)
    ],
)
def test_plain_lightning_differs_from_big_batch(
    strategy: str, optimizer: str, clip: Clip
) -> None:
    """Negative control (pytorch-lightning#20350, #19987). With equal batches only the
    length of the short window's gradient is wrong, which clipping to a norm hides."""
    naive = fit_plain(strategy, optimizer, clip, accumulate=WINDOW)
    expected = reference(strategy, optimizer, clip)
    off = deviation(naive, expected.end, expected.start)
    is_hidden = strategy == "Uniform" and clip == "norm"
    assert (off > NAIVE) is not is_hidden


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_torch_reference_equals_lightning_with_big_batches(
    optimizer: str, clip: Clip
) -> None:
    """The reference loop is what Lightning does without accumulation."""
    lightning = fit_plain("PerToken", optimizer, clip, accumulate=1)
    expected = reference("PerToken", optimizer, clip)
    assert deviation(lightning, expected.end, expected.start) <= 1e-10


@pytest.mark.parametrize("clip", ["norm", "value"])
def test_clipping_is_not_idle(clip: Clip) -> None:
    """The grid's clipping changes what is trained, or it would prove nothing."""
    free, clipped = (reference("PerToken", "sgd", c) for c in (None, clip))
    assert deviation(clipped.end, free.end, free.start) > 0.1


@pytest.mark.parametrize("window", [1, 2, 3, 5, 7, 10, 100])
def test_any_window_length_equals_big_batch(window: int) -> None:
    """Also one that divides the epoch exactly (transformers#37777), and N = 1."""
    module = Mixed()
    start = Plain()
    run = big_batch(SEQUENCES[:38], RAGGED, window=window)
    with warned_if(window > len(RAGGED)):
        trainer(window).fit(module, micro_batches(SEQUENCES[:38]))
    assert deviation(module, run.end, start) <= 1e-10


def warned_if(is_short: bool) -> Any:
    """An epoch shorter than the window is said (pytorch-lightning#21808)."""
    if is_short:
        return pytest.warns(UserWarning, match="the epoch has only 10 batches")
    return pytest.MonkeyPatch.context()


@pytest.mark.parametrize("front", ["mixin", "callback"])
def test_steps_counted_equals_number_of_windows(front: Front) -> None:
    """pytorch-lightning#1549, NeMo-Automodel#2257, keras#19990: no window is lost and
    no step is taken inside one; Adam's counter agrees."""
    module = Mixed(optimizer="adamw") if front == "mixin" else Plain(optimizer="adamw")
    callbacks = [] if front == "mixin" else [AccumulationCallback(PerToken())]
    fitted = trainer(WINDOW, callbacks=callbacks)
    fitted.fit(module, micro_batches(SEQUENCES[:38]))
    counters = [float(s["step"]) for s in fitted.optimizers[0].state.values()]
    assert fitted.global_step == 2 * 3
    assert set(counters) == {6.0}
