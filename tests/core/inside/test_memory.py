"""Without a size, memory errors make chunks finer; the gradient stays exact."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.core.inside.common import (
    EXACT,
    NAIVE,
    Net,
    batch,
    gradient,
    nt_xent,
    off_by,
)
from trainkit import Chunked

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


class Hungry(Net):
    """A net with a budget, and perhaps with draws of its own."""

    def __init__(self, budget: Budget, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)
        self.budget = budget
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            self.sizes.append(len(x))
        return self.head(Counted.apply(self.body(x), self.budget))  # type: ignore[no-any-return]


def step(net: Any) -> Tensor:
    return nt_xent(net(X), LABELS)


def hungry(dropout: float = 0.0) -> tuple[Any, Budget]:
    budget = Budget()
    net = Hungry(budget, dropout).double()
    return net, budget


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize(
    "limits",
    [
        {"most": 13},
        {"most_without": 13, "most": 13},
        {"most_without": 11, "most": 22},
        {"most_backward": 9},
        {"most_without": 22, "most": 13, "most_backward": 5},
        {"most": 1, "most_without": 2},
    ],
    ids=str,
)
def test_chunks_get_finer_where_memory_ends(limits: dict[str, int], keep: Any) -> None:
    net, budget = hungry()
    _, wanted = gradient(net, step)
    vars(budget).update(limits)
    failures = 0
    with Chunked(net, size=None, keep=keep):
        for _ in range(4):
            failures = budget.failures
            assert off_by(gradient(net, step)[1], wanted) <= EXACT
        assert failures
        assert budget.failures == failures  # what fits is remembered
    assert budget.held == 0


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize(
    "limits", [{"most": 13}, {"most_without": 13, "most": 13}], ids=str
)
def test_chunks_that_draw_get_finer_in_the_forward_pass(
    limits: dict[str, int], keep: Any
) -> None:
    net, budget = hungry(dropout=0.5)

    def chunked(sizes: list[int]) -> Any:
        return lambda net: nt_xent(torch.cat([net(c) for c in X.split(sizes)]), LABELS)

    with Chunked(net, size=None, keep=keep) as _:
        vars(budget).update(limits)
        gradient(net, step)  # finds a size
        net.sizes.clear()
        _, found = gradient(net, step)
    vars(budget).update(vars(Budget()) | {"held": 0})
    _, wanted = gradient(net, chunked([10] * 4))
    _, other = gradient(net, step)
    assert off_by(found, wanted) <= EXACT
    assert off_by(other, wanted) > NAIVE


@pytest.mark.parametrize("keep", [0, 1, 9])
def test_chunks_that_drew_are_not_cut_in_the_backward_pass(keep: int) -> None:
    """Their halves would draw otherwise."""
    net, budget = hungry(dropout=0.5)
    with Chunked(net, size=None, keep=keep):
        for _ in range(2):
            gradient(net, step)
        loss = step(net)
        budget.most_backward = 30
        with pytest.raises(torch.OutOfMemoryError, match="no room for 40 rows"):
            loss.backward()


def test_a_fixed_size_raises_memory_errors_as_they_are() -> None:
    net, budget = hungry()
    with Chunked(net, size=20):
        for _ in range(2):
            gradient(net, step)
        budget.most_without = 13
        with pytest.raises(torch.OutOfMemoryError, match="no room for 20 rows"):
            step(net)
        budget.most_without = 99
        loss = step(net)
        budget.most_backward = 13
        with pytest.raises(torch.OutOfMemoryError, match="no room for 20 rows"):
            loss.backward()


def test_one_row_that_does_not_fit_raises() -> None:
    net, budget = hungry()
    with Chunked(net, size=None):
        for _ in range(2):
            gradient(net, step)
        budget.most = budget.most_without = 0
        with pytest.raises(torch.OutOfMemoryError, match="no room for 1 rows"):
            step(net)


def test_no_graph_outlives_its_chunk_or_its_loss() -> None:
    import gc

    net, budget = hungry()
    gc.disable()
    try:
        for keep in (0, 1, 2, 8):
            with Chunked(net, size=5, keep=keep):
                for _ in range(4):
                    gradient(net, step)
                assert budget.held == 0
                budget.highest = 0
                loss = step(net)
                del loss  # never used
                assert budget.held == 0
                gradient(net, step)
                assert budget.highest <= (5 * max(keep, 1))
    finally:
        gc.enable()


def test_the_whole_batch_holds_all_rows() -> None:
    net, budget = hungry()
    gradient(net, step)
    assert budget.highest == 40
