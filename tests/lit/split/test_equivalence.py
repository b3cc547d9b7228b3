"""Training with cut loader batches equals training with the whole ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor

from tests.helpers import NAIVE, TOLERANCE, deviation
from tests.lit.fronts import (
    LOSSES,
    Clip,
    Mixed,
    Plain,
    Recorder,
    Reduction,
    Run,
    big_batch,
    clip_options,
    make_strategy,
    windows_of,
)
from tests.lit.split.common import CUTS, SEQUENCES, SIZES, START, Split, fit
from trainkit import AccumulationCallback, PerSample, PerToken
from trainkit.core.split.micro_batching import MicroBatching

STRATEGIES = ["PerSample", "PerToken"]
MANY = (6, 3, 9, 1, 8, 4, 9)
"""Loader batches, of which several make a window; the last window is short."""


@cache
def reference(
    strategy: str,
    optimizer: str = "sgd",
    clip: Clip = None,
    dtype: torch.dtype = torch.float64,
    sizes: tuple[int, ...] = SIZES,
    window: int = 1,
) -> Run:
    return big_batch(
        SEQUENCES,
        sizes,
        LOSSES[strategy],
        window=window,
        optimizer=optimizer,
        clip=clip,
        dtype=dtype,
    )


def run_split(
    strategy: str,
    cut: MicroBatching,
    *,
    reduction: Reduction = "mean",
    clip: Clip = None,
    sizes: Sequence[int] = SIZES,
    window: int = 1,
    **how: Any,
) -> tuple[Run, int]:
    """What happened, and the most micro-batches that a window had."""
    made = make_strategy(strategy, reduction)
    module = Split(LOSSES[strategy], strategy=made, cut=cut, reduction=reduction, **how)
    run = Run(START)
    recorder = Counting(run)
    fit(module, recorder, window=window, sizes=sizes, **clip_options(clip))
    return run, recorder.most


class Counting(Recorder):
    """Also counts the micro-batches of the windows."""

    most = 0

    def on_before_optimizer_step(
        self, trainer: Any, pl_module: Any, optimizer: Any
    ) -> None:
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        window = windows_of(trainer).last_window
        assert window is not None
        self.most = max(self.most, int(window.num_micro_batches))


@pytest.mark.parametrize(
    ("strategy", "cut", "optimizer", "clip", "reduction"),
    [  # every pair of values
        ("PerSample", "size", "sgd", "norm", "sum"),
        ("PerSample", "size", "momentum", "value", "sum"),
        ("PerSample", "size", "adamw", None, "mean"),
        ("PerSample", "tokens", "sgd", "value", "mean"),
        ("PerSample", "tokens", "momentum", None, "sum"),
        ("PerToken", "size", "adamw", "norm", "sum"),
        ("PerToken", "size", "sgd", "value", "sum"),
        ("PerToken", "tokens", "sgd", None, "sum"),
        ("PerToken", "tokens", "momentum", "norm", "mean"),
        ("PerToken", "tokens", "adamw", "value", "mean"),
    ],
)
def test_every_cut_equals_big_batch(
    strategy: str, cut: str, optimizer: str, clip: Clip, reduction: Reduction
) -> None:
    """Weights after one and after two epochs, and every window's loss, in float64."""
    run, most = run_split(
        strategy, CUTS[cut], optimizer=optimizer, clip=clip, reduction=reduction
    )
    expected = reference(strategy, optimizer, clip)
    assert most > 2
    assert max(run.deviations(expected)) <= TOLERANCE[torch.float64]
    assert run.losses == pytest.approx(expected.losses, rel=1e-9)


@pytest.mark.parametrize("cut", ["size and tokens", "rows", "auto"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_other_cuts_equal_big_batch(strategy: str, cut: str) -> None:
    run, _ = run_split(strategy, CUTS[cut], optimizer="adamw")
    expected = reference(strategy, "adamw")
    assert max(run.deviations(expected)) <= TOLERANCE[torch.float64]
    assert run.losses == pytest.approx(expected.losses, rel=1e-9)


@pytest.mark.parametrize(
    ("strategy", "cut", "reduction"),
    [  # every pair of values
        ("PerSample", "size", "sum"),
        ("PerSample", "tokens", "mean"),
        ("PerSample", "auto", "sum"),
        ("PerToken", "size", "mean"),
        ("PerToken", "tokens", "sum"),
        ("PerToken", "auto", "mean"),
    ],
)
def test_sgd_in_float32_equals_big_batch(
    strategy: str, cut: str, reduction: Reduction
) -> None:
    run, _ = run_split(strategy, CUTS[cut], reduction=reduction, dtype=torch.float32)
    expected = reference(strategy, dtype=torch.float32)
    assert max(run.deviations(expected)) <= 2e-5
    assert run.losses == pytest.approx(expected.losses, rel=1e-4)


@pytest.mark.parametrize(
    ("strategy", "window", "cut", "reduction"),
    [  # every pair of values
        ("PerSample", 2, "size", "mean"),
        ("PerSample", 2, "auto", "sum"),
        ("PerSample", 3, "tokens", "sum"),
        ("PerToken", 2, "tokens", "mean"),
        ("PerToken", 3, "size", "sum"),
        ("PerToken", 3, "auto", "mean"),
    ],
)
def test_several_loader_batches_in_a_window_equal_big_batch(
    strategy: str, window: int, cut: str, reduction: Reduction
) -> None:
    """`accumulate_grad_batches` on top: the streamed division, and a short last
    window."""
    run, _ = run_split(
        strategy,
        CUTS[cut],
        sizes=MANY,
        window=window,
        optimizer="momentum",
        reduction=reduction,
        clip="norm",
    )
    expected = reference(strategy, "momentum", "norm", sizes=MANY, window=window)
    assert max(run.deviations(expected)) <= TOLERANCE[torch.float64]
    assert run.losses == pytest.approx(expected.losses, rel=1e-9)


@pytest.mark.parametrize("size", [1, 3, 16, 17, 100])
def test_any_size_takes_one_step_for_each_loader_batch(size: int) -> None:
    module = Split(cut=MicroBatching(size=size), optimizer="adamw")
    fitted = fit(module)
    counters = {float(s["step"]) for s in fitted.optimizers[0].state.values()}
    assert fitted.global_step == 2 * len(SIZES)
    assert counters == {2.0 * len(SIZES)}
    expected = reference("PerToken", "adamw")
    assert deviation(module, expected.end, START) <= TOLERANCE[torch.float64]


@pytest.mark.parametrize("cut", ["size", "auto"])
def test_module_of_somebody_else_equals_big_batch(cut: str) -> None:
    """With the callback, no line of it changes."""
    module = Plain(optimizer="adamw")
    fit(module, AccumulationCallback(PerToken(), micro_batching=CUTS[cut]))
    expected = reference("PerToken", "adamw")
    assert deviation(module, expected.end, START) <= TOLERANCE[torch.float64]


@pytest.mark.parametrize("schedule", [{0: 1, 1: 2}, {0: 2, 1: 1}], ids=str)
def test_lightnings_schedule_equals_that_of_whole_batches(schedule: Any) -> None:
    made = Split(optimizer="momentum"), Split(optimizer="momentum", cut=None)
    for each in made:
        fit(each, GradientAccumulationScheduler(schedule), sizes=MANY)
    assert deviation(*made, START) <= TOLERANCE[torch.float64]


class MeanOfMeans(Plain):
    """What a naive cut does: each micro-batch counts alike."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = zip(batch["ids"].split(4), batch["labels"].split(4), strict=True)
        losses = [self.loss(self.net, {"ids": x, "labels": y}) for x, y in parts]
        return torch.stack(losses).mean()


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [("PerSample", "sgd"), ("PerToken", "momentum"), ("PerToken", "adamw")],
)
def test_mean_of_micro_batch_means_differs(strategy: str, optimizer: str) -> None:
    """Negative control."""
    naive = MeanOfMeans(LOSSES[strategy], optimizer=optimizer)
    fit(naive)
    expected = reference(strategy, optimizer)
    assert deviation(naive, expected.end, START) > NAIVE


def test_wrong_strategy_differs() -> None:
    """Negative control: a mean over tokens that is weighed by samples."""
    module = Split(strategy=PerSample())
    fit(module)
    assert deviation(module, reference("PerToken").end, START) > NAIVE


def test_without_micro_batching_nothing_is_cut() -> None:
    module = Mixed()
    module.accumulation = PerToken()
    fitted = fit(module)
    window = windows_of(fitted).last_window
    assert window is not None
    assert int(window.num_micro_batches) == 1
