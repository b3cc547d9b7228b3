"""Without a size, memory errors make chunks finer; no graph and no gradient is held
twice."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.benchmarks.measuring import LiveBytes
from tests.core.inside.common import (
    EXACT,
    NAIVE,
    Net,
    batch,
    gradient,
    nt_xent,
    off_by,
    refused,
)
from trainkit import Chunked
from trainkit.core.inside.cut import Shadows

X, LABELS = batch(40)


class Budget:
    """Rows that graphs hold, and how many may be held."""

    def __init__(self) -> None:
        self.most = self.most_backward = self.most_without = 10**9
        self.held = self.highest = self.failures = 0

    def ask(self, rows: int, most: int) -> None:
        if rows > most:
            self.failures += 1
            raise torch.OutOfMemoryError(f"no room for {rows} rows")

    def give(self, rows: int) -> None:
        self.held -= rows


class Counted(torch.autograd.Function):
    """Holds its rows while its graph lives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, budget: Budget) -> Tensor:
        ctx.budget = budget
        if not ctx.needs_input_grad[0]:
            budget.ask(len(x), budget.most_without)
            return x.clone()
        budget.ask(budget.held + len(x), budget.most)
        budget.held += len(x)
        budget.highest = max(budget.highest, budget.held)
        weakref.finalize(ctx, budget.give, len(x))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        ctx.budget.ask(len(given[0]), ctx.budget.most_backward)
        return given[0], None


def step(net: Any) -> Tensor:
    return nt_xent(net(X), LABELS)


def hungry(dropout: float = 0.0) -> tuple[Any, Budget]:
    """A net with a budget."""
    budget, sizes = Budget(), []

    def counted(net: Any, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            sizes.append(len(x))
        return net.head(Counted.apply(net.body(x), budget))

    return Net(counted, dropout=dropout, sizes=sizes).double(), budget


@pytest.mark.parametrize(
    "limits",
    [
        {"most_without": 11, "most": 22},
        {"most_backward": 9},
        {"most_without": 22, "most": 13, "most_backward": 5},
        {"most": 1, "most_without": 2},
    ],
)
def test_chunks_get_finer_where_memory_ends(limits: dict[str, int]) -> None:
    net, budget = hungry()
    _, wanted = gradient(net, step)
    vars(budget).update(limits)
    failures = 0
    with Chunked(net, size=None):
        for _ in range(4):
            failures = budget.failures
            assert off_by(gradient(net, step)[1], wanted) <= EXACT
        assert failures
        assert budget.failures == failures  # what fits is remembered
    assert budget.held == 0


def test_chunks_that_draw_get_finer_in_the_forward_pass() -> None:
    net, budget = hungry(dropout=0.5)
    with Chunked(net, size=None):
        budget.most = budget.most_without = 13
        gradient(net, step)  # finds a size
        _, found = gradient(net, step)
    vars(budget).update(vars(Budget()))
    _, wanted = gradient(
        net, lambda net: nt_xent(torch.cat([net(c) for c in X.split(10)]), LABELS)
    )
    assert off_by(found, wanted) <= EXACT
    assert off_by(gradient(net, step)[1], wanted) > NAIVE


def test_chunks_that_drew_are_not_cut_in_the_backward_pass() -> None:
    """Their halves would draw otherwise."""
    net, budget = hungry(dropout=0.5)
    with Chunked(net, size=None):
        for _ in range(2):
            gradient(net, step)
        loss = step(net)
        budget.most_backward = 30
        with pytest.raises(torch.OutOfMemoryError, match="no room for 40 rows"):
            loss.backward()


def test_memory_that_ends_in_evaluation_mode_makes_chunks_finer() -> None:
    """In which rows that draw are compared: it would go unseen that these see all."""

    def seeing(net: Any, x: Tensor) -> Tensor:
        if not net.training and len(x) > 9:
            raise torch.OutOfMemoryError
        return net.plain(x) - net.plain(x).mean(0)

    refused(Net(seeing, dropout=0.5).double(), "depends on", X, size=None)


@pytest.mark.parametrize(("size", "rows", "later"), [(20, 20, 20), (None, 1, 40)])
def test_what_cannot_be_cut_finer_raises_memory_errors_as_they_are(
    size: int | None, rows: int, later: int
) -> None:
    """A fixed size, and one row."""
    net, budget = hungry()
    with Chunked(net, size=size):
        gradient(net, step)
        loss = step(net)
        budget.most_without = budget.most = budget.most_backward = 0
        with pytest.raises(torch.OutOfMemoryError, match=f"no room for {rows} rows"):
            step(net)
        with pytest.raises(torch.OutOfMemoryError, match=f"no room for {later} rows"):
            loss.backward()


def test_no_graph_outlives_its_chunk_or_its_loss() -> None:
    net, budget = hungry()
    gc.disable()
    try:
        with Chunked(net, size=5):
            for _ in range(4):
                gradient(net, step)
            assert budget.held == 0
            budget.highest = 0
            loss = step(net)
            del loss  # never used
            assert budget.held == 0
            gradient(net, step)
            assert budget.highest <= 5
    finally:
        gc.enable()
    gradient(net, step)
    assert budget.highest == 40  # the whole batch holds all rows


# ---- gradients are added up where they arrive ----------------------------------------


def peak(size: int | None) -> float:
    """The most bytes of the second step, as a multiple of the parameters'."""
    net, rows = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)]), 16
    x = torch.randn(rows, 256)
    with Chunked(net, size=4):
        net(x).square().mean().backward()  # which looks at rows as well
        net(x)
        net.zero_grad()
        with LiveBytes() as live:
            if size is None:
                net(x).square().mean().backward()
            else:  # the control: sums beside each chunk's gradients
                sums = [torch.zeros_like(p) for p in net.parameters()]
                for part in x.split(size):
                    loss = net(part).square().mean()
                    found = torch.autograd.grad(loss, list(net.parameters()))
                    for one, other in zip(sums, found, strict=True):
                        one.add_(other)
    return live.peak / (4 * sum(p.numel() for p in net.parameters()))


def test_there_is_never_a_second_gradient_of_all_parameters() -> None:
    assert peak(None) < 1.5
    assert peak(4) > 1.9


@pytest.mark.parametrize("again", [True, False], ids=["all again", "as it stands"])
def test_memory_that_ends_within_a_chunk_leaves_no_share_of_it(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's gradient has arrived when the body's has no room."""
    net, budget = hungry()
    _, wanted = gradient(net, step)
    budget.most_backward = 9
    if not again:
        monkeypatch.setattr(Shadows, "clear", lambda _: None)
    with Chunked(net):
        _, found = gradient(net, step)
    assert budget.failures
    assert (off_by(found, wanted) <= EXACT) == again
