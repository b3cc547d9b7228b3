"""A module in chunks has the whole batch's loss and gradient, whatever the loss.
Without a size, memory errors make chunks finer; nothing is held twice."""

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
    LABELS,
    LOSSES,
    NAIVE,
    Loss,
    Net,
    X,
    batch,
    gradient,
    nt_xent,
    off,
    off_by,
    refused,
    step,
    twin,
    vicreg,
)
from trainkit import Chunked
from trainkit.core.inside.cut import Shadows


@pytest.mark.parametrize(
    ("loss", "calls"), [*((loss, 1) for loss in LOSSES), (nt_xent, 2), (vicreg, 3)]
)
def test_gradient_in_chunks_equals_the_whole_batch(loss: Loss, calls: int) -> None:
    """The net is called once, on two views, or a third time for a target."""
    net, (x, labels) = twin(Net()), batch()

    def whole(net: Any) -> Tensor:
        out = net(x)
        if calls > 1:
            out = out + net(x.flip(1))
        if calls > 2:
            out = out * net(x.roll(1, 1)).sigmoid()
        return loss(out, labels)

    def naive(net: Any) -> Tensor:
        parts = zip(x.split(18), labels.split(18), strict=True)
        return torch.stack([loss(net(a), b) for a, b in parts]).mean()

    wanted_loss, wanted = gradient(net, whole)
    if calls == 1:  # the control: a mean of micro-batches
        assert off_by(gradient(net, naive)[1], wanted) > NAIVE
    for size in (1, 4, 21):
        with Chunked(net, size=size):
            for _ in range(3):  # the checks of the first calls, and without them
                found_loss, found = gradient(net, whole)
                assert abs(found_loss / wanted_loss - 1) <= EXACT
                assert off_by(found, wanted) <= EXACT


@pytest.mark.parametrize(("dropout", "calls"), [(0.0, 1), (0.5, 1), (0.5, 3)])
def test_dropout_equals_that_of_chunks_in_one_graph(dropout: float, calls: int) -> None:
    net = twin(Net(dropout=dropout))
    views = [X, X.flip(1), X.roll(1, 1)][:calls]

    def plain(net: Any) -> Tensor:
        outs = [torch.cat([net(c) for c in v.tensor_split(6)]) for v in views]
        return nt_xent(torch.stack(outs).prod(0), outs[0])

    def whole(net: Any) -> Tensor:
        outs = [net(v) for v in views]
        return nt_xent(torch.stack(outs).prod(0), outs[0])

    _, wanted = gradient(net, plain)
    after = torch.get_rng_state()
    other = gradient(net, plain, seed=4)[1]
    assert (off_by(other, wanted) > NAIVE) == bool(dropout)  # the draws matter
    assert off(net, whole, wanted=wanted, size=4) <= EXACT
    with Chunked(net, size=4):
        gradient(net, whole)
    assert torch.equal(torch.get_rng_state(), after)


def test_the_last_chunk_runs_once_and_a_graph_is_that_of_a_chunk() -> None:
    rows: list[tuple[int, bool]] = []

    def counting(net: Any, x: Tensor) -> Tensor:
        rows.append((len(x), torch.is_grad_enabled()))
        return net.plain(x)

    net = twin(Net(counting))
    with Chunked(net, size=4):
        for _ in range(4):  # calls 1, 2 and 4 look at rows as well
            gradient(net, step)
        rows.clear()
        gradient(net, step)
    assert len(rows) == 6 + 5
    assert max(size for size, has_graph in rows if has_graph) == 4


def test_float32_is_off_by_rounding() -> None:
    assert off(Net(), size=3) <= 2e-5


# ---- memory --------------------------------------------------------------------------

FORTY, _ = batch(40)


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


def of_forty(net: Any) -> Tensor:
    return nt_xent(net(FORTY), LABELS)


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
    _, wanted = gradient(net, of_forty)
    vars(budget).update(limits)
    failures = 0
    with Chunked(net, size=None):
        for _ in range(4):
            failures = budget.failures
            assert off_by(gradient(net, of_forty)[1], wanted) <= EXACT
        assert failures
        assert budget.failures == failures  # what fits is remembered
    assert budget.held == 0


def test_chunks_that_draw_get_finer_in_the_forward_pass() -> None:
    net, budget = hungry(dropout=0.5)
    with Chunked(net, size=None):
        budget.most = budget.most_without = 13
        gradient(net, of_forty)  # finds a size
        _, found = gradient(net, of_forty)
    vars(budget).update(vars(Budget()))

    def in_tens(net: Any) -> Tensor:
        return nt_xent(torch.cat([net(c) for c in FORTY.split(10)]), LABELS)

    _, wanted = gradient(net, in_tens)
    assert off_by(found, wanted) <= EXACT
    assert off_by(gradient(net, of_forty)[1], wanted) > NAIVE


def test_chunks_that_drew_are_not_cut_in_the_backward_pass() -> None:
    """Their halves would draw otherwise."""
    net, budget = hungry(dropout=0.5)
    with Chunked(net, size=None):
        for _ in range(2):
            gradient(net, of_forty)
        loss = of_forty(net)
        budget.most_backward = 30
        with pytest.raises(torch.OutOfMemoryError, match="no room for 40 rows"):
            loss.backward()


def test_memory_that_ends_in_evaluation_mode_makes_chunks_finer() -> None:
    """In which rows that draw are compared: it would go unseen that these see all."""

    def seeing(net: Any, x: Tensor) -> Tensor:
        if not net.training and len(x) > 9:
            raise torch.OutOfMemoryError
        return net.plain(x) - net.plain(x).mean(0)

    refused(Net(seeing, dropout=0.5).double(), "depends on", FORTY, size=None)


@pytest.mark.parametrize(("size", "rows", "later"), [(20, 20, 20), (None, 1, 40)])
def test_what_cannot_be_cut_finer_raises_them(size: Any, rows: int, later: int) -> None:
    """A fixed size, and one row."""
    net, budget = hungry()
    with Chunked(net, size=size):
        gradient(net, of_forty)
        loss = of_forty(net)
        budget.most_without = budget.most = budget.most_backward = 0
        with pytest.raises(torch.OutOfMemoryError, match=f"no room for {rows} rows"):
            of_forty(net)
        with pytest.raises(torch.OutOfMemoryError, match=f"no room for {later} rows"):
            loss.backward()


def test_no_graph_outlives_its_chunk_or_its_loss() -> None:
    net, budget = hungry()
    gc.disable()
    try:
        with Chunked(net, size=5):
            for _ in range(4):
                gradient(net, of_forty)
            assert budget.held == 0
            budget.highest = 0
            of_forty(net)  # a loss that is never used
            assert budget.held == 0
            gradient(net, of_forty)
            assert budget.highest <= 5
    finally:
        gc.enable()
    gradient(net, of_forty)
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
def test_a_chunk_without_memory_leaves_no_share(again: bool, monkeypatch: Any) -> None:
    """The head's gradient has arrived when the body's has no room."""
    net, budget = hungry()
    _, wanted = gradient(net, of_forty)
    budget.most_backward = 9
    if not again:
        monkeypatch.setattr(Shadows, "clear", lambda _: None)
    with Chunked(net):
        _, found = gradient(net, of_forty)
    assert budget.failures
    assert (off_by(found, wanted) <= EXACT) == again
