"""An `optimizer_step` that leaves steps out: as with whole or streamed batches."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from tests.helpers import NAIVE, TOLERANCE, deviation, trainer
from tests.lit.fronts import Plain
from tests.lit.split.common import (
    FIXED,
    SIZES,
    START,
    Split,
    fit,
    loader_batches,
)
from trainkit import AccumulationCallback, PerToken

DROPPED = "an open window of .* was dropped, since its gradients were zeroed before"

pytestmark = pytest.mark.filterwarnings("ignore:accumulation. an open window")


class EverySecond:
    """Runs the closure, as Lightning asks, and steps every second time."""

    num_calls = 0

    def optimizer_step(
        self: Any,
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Any = None,
    ) -> None:
        self.num_calls += 1
        if self.num_calls % 2:
            optimizer_closure()
        else:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)  # type: ignore[misc]


class Own(EverySecond, Split): ...


class Foreign(EverySecond, Plain): ...


def told_of(module: Any, *callbacks: Any, window: int) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(module, *callbacks, window=window)
    return [str(each.message) for each in told if "was dropped" in str(each.message)]


@pytest.mark.parametrize("front", ["mixin", "callback"])
def test_the_window_of_a_step_left_out_is_dropped_and_said(front: str) -> None:
    callbacks = []
    if front == "callback":
        callbacks = [AccumulationCallback(PerToken(), micro_batching=FIXED)]
    module = Own() if front == "mixin" else Foreign()
    with pytest.warns(UserWarning, match=DROPPED):
        fit(module, *callbacks)
    whole, plain = Foreign(), Plain()
    fit(whole)
    fit(plain)
    assert deviation(module, whole, START) <= TOLERANCE[torch.float64]
    assert deviation(plain, whole, START) > NAIVE


@pytest.mark.parametrize("window", [1, 2])
def test_it_is_said_as_often_as_in_streamed_windows(window: int) -> None:
    """Each epoch of three batches has one or two steps, and the last window of an epoch
    may end with it."""
    cut, streamed = Own(), Own(cut=None)
    said = [told_of(each, window=window) for each in (cut, streamed)]
    why = [[text.partition("since ")[2] for text in each] for each in said]
    assert why[0] == why[1]
    assert len(why[0]) == {1: 3, 2: 2}[window]
    assert deviation(cut, streamed, START) <= TOLERANCE[torch.float64]


class Twice(Split):
    """Runs its closure by itself before the step does."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer_closure()
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


def test_a_closure_that_runs_before_the_step_counts_once() -> None:
    module, whole = Twice(), Split(cut=None)
    fit(module)
    fit(whole)
    assert deviation(module, whole, START) <= TOLERANCE[torch.float64]


def test_a_step_left_out_in_the_last_batch_is_said_at_the_end_of_the_epoch() -> None:
    module, fitted = Own(), trainer(1, max_epochs=1)
    with pytest.warns(UserWarning, match="dropped, since the epoch ended inside it"):
        fitted.fit(module, loader_batches())
    assert module.num_calls == len(SIZES)
