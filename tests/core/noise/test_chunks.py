"""The sums of the chunks of an inner cut, in a plain loop, against those by hand."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.core.noise.test_moments import CLOSE, newest, off
from trainkit import Accumulator, Chunked, NoiseMoments, PerSample
from trainkit.core.inside import sums
from trainkit.core.inside.cut import no_shares
from trainkit.core.noise.chunks import ChunkNorms
from trainkit.core.ranks import Ranks

ROWS, CHUNK = 24, 8
BATCHES = torch.randn(2, ROWS, 5, generator=torch.Generator().manual_seed(0)).double()


class NoRoom(torch.autograd.Function):
    """Its backward pass runs out of memory so many times."""

    times = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        if NoRoom.times:
            NoRoom.times -= 1
            raise torch.OutOfMemoryError("no room")
        return given[0]


class Tanh(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return NoRoom.apply(x.tanh())  # type: ignore[no-any-return]


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), Tanh(), nn.Linear(7, 3)).double()


def loss_of(z: Tensor) -> Tensor:
    """Each row is compared with all others."""
    return nn.functional.cross_entropy(z @ z.T, torch.arange(len(z)).flip(0))


def by_hand(sizes: list[int]) -> Tensor:
    """The sums of a window of both batches."""
    net, rows = encoder(), []
    for batch in BATCHES:
        outputs = [net(chunk) for chunk in batch.split(sizes)]
        given = torch.autograd.grad(loss_of(torch.cat(outputs)), outputs)
        shares = [
            torch.autograd.grad(output, list(net.parameters()), one)
            for output, one in zip(
                [net(chunk) for chunk in batch.split(sizes)], given, strict=True
            )
        ]
        u = ROWS * torch.stack([torch.cat([g.flatten() for g in s]) for s in shares])
        w = torch.tensor(sizes).double()
        row = [u.sum(0).square().sum(), u.square().sum(), w.sum() ** 2, w @ w]
        rows.append(torch.stack([*row, w.sum(), w.sum()]))
    return torch.cat([torch.stack(rows).sum(0), torch.ones(1)])


class Training:
    """A net that runs in chunks, whose windows can be measured."""

    def __init__(self, size: int | None = CHUNK, scaler: Any = None) -> None:
        self.net, self.scaler = encoder(), scaler
        self.chunked = Chunked(self.net, size=size, keep=0)
        self.accumulator = Accumulator(
            PerSample(), module=self.net, scaler=scaler, nonfinite="allow"
        )
        parameters = list(self.net.parameters())
        self.moments = NoiseMoments(
            self.accumulator, parameters, cuts=lambda: [self.chunked._cut]
        )

    def run(self, *batches: Tensor) -> None:
        for batch in batches:
            loss = loss_of(self.net(batch))
            self.accumulator.backward(loss, batch, backward=self._backward)

    def _backward(self, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def added(self) -> Tensor:
        self.moments.add(self.accumulator.finish(list(self.net.parameters())))
        self.net.zero_grad()
        return newest(self.moments)

    def window(self) -> Tensor:
        self.moments.watch()
        self.run(*BATCHES)
        return self.added()


@pytest.mark.parametrize("has_scaler", [False, True])
def test_sums_are_those_by_hand(has_scaler: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if has_scaler else None
    found = Training(scaler=scaler).window()
    assert off(found, by_hand([CHUNK] * 3)) < CLOSE
    assert off(found, by_hand([2 * CHUNK, CHUNK])) > 0.1  # the control: other chunks


def test_a_backward_pass_that_runs_out_of_memory_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sums, "LARGE", 1)  # gradients are added as they arrive
    training = Training(size=None)
    training.window()
    monkeypatch.setattr(NoRoom, "times", 1)
    row = training.window()
    assert NoRoom.times == 0
    assert training.moments.why_not is None
    assert off(row, by_hand([ROWS // 2] * 2)) < CLOSE


@pytest.mark.parametrize("is_whole", [True, False])
def test_an_open_window_resumes_if_its_beginning_was_measured(is_whole: bool) -> None:
    training = Training()
    plain = training.window()
    if is_whole:
        training.moments.watch()
    training.run(BATCHES[0])
    saved = copy.deepcopy(
        [training.accumulator.state_dict(), training.moments.state_dict()]
    )
    resumed = Training()
    resumed.accumulator.load_state_dict(saved[0])
    resumed.moments.load_state_dict(saved[1])
    if not is_whole:
        resumed.moments.watch()
    resumed.run(BATCHES[1])
    assert torch.equal(resumed.added(), plain if is_whole else torch.zeros(7).double())


def test_a_dropped_window_leaves_nothing() -> None:
    training = Training()
    plain = training.window()
    training.moments.watch()
    training.run(BATCHES[0])
    training.accumulator.drop()
    training.net.zero_grad()
    training.run(*BATCHES)
    assert torch.equal(training.added(), plain)


def test_a_copy_of_the_cut_is_not_measured() -> None:
    training = Training()
    training.moments.watch()
    assert isinstance(training.chunked._cut.shares, partial)
    assert copy.deepcopy(training.chunked)._cut.shares is no_shares


def test_one_rank_resumes_the_sums_of_all() -> None:
    training = Training()
    training.moments.watch()
    training.run(BATCHES[0])
    saved = training.moments.state_dict(over_ranks=True)["open"]
    kept = []
    for index in range(2):
        norms = ChunkNorms(training.accumulator, [])
        norms.restore(saved, Ranks(size=2, index=index), torch.device("cpu"))
        assert norms._sums is not None
        kept.append(norms._sums)
    assert torch.equal(torch.stack(kept).sum(0), saved[0])
    assert saved.any()


@pytest.mark.parametrize("times", [torch.inf, torch.nan])
def test_a_window_without_finite_gradients_does_not_count(times: float) -> None:
    training = Training()
    training.moments.watch()
    training.run(times * BATCHES[0], times * BATCHES[1])
    assert not training.added().any()
    assert training.window().all()  # the control
