"""What a window's sums leave out: passes that were run again, and whole windows of
which some was not seen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.core.noise.test_moments import (
    SIZES,
    micro_batches,
    newest,
)
from tests.helpers import TokenNet, token_loss
from trainkit import Accumulator, NoiseMoments, PerToken

BATCHES = micro_batches()


class Training:
    """A net whose windows can be measured, after a part of another was loaded."""

    def __init__(self) -> None:
        self.net = TokenNet()
        self.accumulator = Accumulator(PerToken(), module=self.net, nonfinite="allow")
        self.moments = NoiseMoments(self.accumulator, list(self.net.parameters()))

    def run(self, *batches: dict[str, Tensor], factor: float = 1.0) -> None:
        for batch in batches:
            loss = factor * token_loss(self.net, batch)
            self.accumulator.backward(loss, batch)

    def added(self) -> Tensor:
        stats = self.accumulator.finish(list(self.net.parameters()))
        self.moments.add(stats, samples=sum(SIZES))
        self.net.zero_grad()
        return newest(self.moments)

    def window(self, factor: float = 1.0) -> Tensor:
        self.moments.watch()
        self.run(*BATCHES, factor=factor)
        return self.added()


def test_a_pass_that_is_run_again_counts_once() -> None:
    training = Training()
    plain = training.window()
    training.moments.watch()
    training.run(*BATCHES[:2])
    kept = training.accumulator.window.copy()
    gradients = [
        p.grad.clone() for p in training.net.parameters() if p.grad is not None
    ]
    training.run(BATCHES[4])  # too much for the memory, say
    for parameter, gradient in zip(training.net.parameters(), gradients, strict=True):
        parameter.grad = gradient
    training.accumulator.rewind(kept)
    training.run(*BATCHES[2:])
    assert torch.equal(training.added(), plain)


def test_a_window_that_is_watched_too_late_does_not_count() -> None:
    training = Training()
    training.run(BATCHES[0])
    training.moments.watch()
    training.run(*BATCHES[1:])
    assert not training.added().any()
    assert training.window().all()  # the control


@pytest.mark.parametrize("factor", [torch.inf, torch.nan])
def test_a_window_without_finite_gradients_does_not_count(factor: float) -> None:
    """As a gradient scaler's first ones may be."""
    tables = []
    for has_broken in (False, True):
        training = Training()
        for number in range(8):
            if has_broken and number == 3:
                assert not training.window(factor).any()
            training.window()
        assert training.moments.estimate() is not None
        table = training.moments.table
        tables.append(table[table[:, -1] > 0])
    assert torch.equal(*tables)


def test_a_dropped_window_leaves_nothing() -> None:
    training = Training()
    plain = training.window()
    training.moments.watch()
    training.run(*BATCHES[:2])
    training.accumulator.drop()
    training.net.zero_grad()
    training.run(*BATCHES)
    assert torch.equal(training.added(), plain)


def test_a_part_that_another_rank_saved_is_not_loaded() -> None:
    training = Training()
    training.moments.watch()
    training.run(BATCHES[0])
    state, noise = training.accumulator.state_dict(), training.moments.state_dict()
    for rank, is_loaded in ((0, True), (1, False)):
        resumed = Training()
        resumed.accumulator.load_state_dict(state)
        resumed.moments.load_state_dict(noise | {"rank": rank})
        assert resumed.moments.is_watching == is_loaded
    resumed = Training()  # whose window has no beginning
    resumed.moments.load_state_dict(noise)
    assert not resumed.moments.is_watching


@pytest.mark.parametrize("is_measured", [False, True])
def test_a_window_whose_beginning_is_lost_does_not_count(is_measured: bool) -> None:
    """Its saver has not measured it, or had other ranks."""
    training = Training()
    if is_measured:
        training.moments.watch()
    training.run(BATCHES[0])
    state = training.accumulator.state_dict()
    noise = training.moments.state_dict(over_ranks=True)
    if is_measured:
        state["weights"] = torch.cat([state["weights"]] * 2)
        noise["open"] = torch.cat([noise["open"]] * 2)
    resumed = Training()
    resumed.accumulator.load_state_dict(state)
    resumed.moments.load_state_dict(noise)
    if not is_measured:
        resumed.moments.watch()
    resumed.run(*BATCHES[1:])
    assert not resumed.added().any()
