"""Large gradients are added as they arrive; the sums are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.benchmarks.live_bytes import LiveBytes
from tests.core.inside.common import EXACT, NAIVE, Net, batch, gradient, nt_xent, off_by
from trainkit import Chunked
from trainkit.core.inside import sums
from trainkit.core.inside.sums import Sums
from trainkit.errors import TrainkitError

X, LABELS = batch(24)
WIDTH, LAYERS = 256, 6


@pytest.fixture(autouse=True)
def _all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "LARGE", 1)


class Deep(nn.Module):
    """Layers with far more parameters than a chunk's graph holds."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def peak(large: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """The most bytes of a step, as a multiple of the parameters'."""
    monkeypatch.setattr(sums, "LARGE", large)
    net, rows = Deep(), torch.randn(16, WIDTH)
    with Chunked(net, size=4, keep=0), LiveBytes() as live:
        net(rows).square().mean().backward()
    return live.peak / (4 * sum(p.numel() for p in net.parameters()))


def test_there_is_never_a_second_gradient_of_all_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert peak(1, monkeypatch) < 1.5
    assert peak(10**9, monkeypatch) > 1.9  # the control


class Within(nn.Module):
    """Its backward pass holds another one, over the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    @torch.enable_grad()
    def inner(self, x: Tensor) -> Tensor:
        weight = self.weight
        (slope,) = torch.autograd.grad(
            (x @ weight).tanh().sum(), weight, create_graph=True
        )
        return x @ (weight - 0.1 * slope / len(x))

    def forward(self, x: Tensor) -> Tensor:
        rows = [checkpoint(self.inner, row, use_reentrant=False) for row in x.split(1)]
        return torch.cat(rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("mine", [True, False], ids=["ours alone", "any pass"])
def test_a_pass_within_the_pass_is_left_alone(
    mine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not mine:
        monkeypatch.setattr(sums, "backward_pass", lambda: 0)
    torch.manual_seed(0)
    net, x = Within().double(), X[:, :6]
    _, wanted = gradient(net, lambda m: nt_xent(m(x), LABELS))
    with Chunked(net, size=5):
        if mine:
            _, found = gradient(net, lambda m: nt_xent(m(x), LABELS))
            assert off_by(found, wanted) <= EXACT
        else:  # the control: another pass's gradient is taken for this one's
            with pytest.raises(TrainkitError, match="is not the sum of"):
                net(x)


def test_a_cut_within_a_cut() -> None:
    net = Net().double()
    _, wanted = gradient(net, lambda m: nt_xent(m(X), LABELS))
    with Chunked(net, size=7), Chunked(net.body, size=2):
        _, found = gradient(net, lambda m: nt_xent(m(X), LABELS))
    assert off_by(found, wanted) <= EXACT


def test_a_parameter_that_is_an_output() -> None:
    class Told(Net):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), self.head.weight

    def step(net: Any) -> Tensor:
        out, weight = net(X)
        return nt_xent(out, LABELS) + weight.square().sum()

    net = Told().double()
    _, wanted = gradient(net, step)
    with Chunked(net, size=5):
        assert off_by(gradient(net, step)[1], wanted) <= EXACT


class Stops(torch.autograd.Function):
    """Runs out of memory in backward, in the first calls with many rows."""

    left = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        if len(given[0]) > 3 and Stops.left:
            Stops.left -= 1
            raise torch.OutOfMemoryError("no room")
        return given[0]


@pytest.mark.parametrize("again", [True, False], ids=["all again", "as it stands"])
def test_memory_that_ends_within_a_chunk_leaves_no_share_of_it(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hungry(Net):
        def forward(self, x: Tensor) -> Tensor:
            # The head's gradient has arrived when the body's has no room.
            return self.head(Stops.apply(self.body(x)))  # type: ignore[no-any-return]

    if not again:
        monkeypatch.setattr(Sums, "is_torn", False)
    net = Hungry().double()
    _, wanted = gradient(net, lambda m: nt_xent(m(X), LABELS))
    monkeypatch.setattr(Stops, "left", 2)
    with Chunked(net, keep=0):
        _, found = gradient(net, lambda m: nt_xent(m(X), LABELS))
    assert not Stops.left
    assert (off_by(found, wanted) <= EXACT) == again


def test_gradients_of_one_tensor_for_two_parameters() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.randn(3))
            self.two = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return x[:, :3] * (self.one + self.two)

    net = Both().double()
    _, wanted = gradient(net, lambda m: nt_xent(m(X), LABELS))
    with Chunked(net, size=5):
        _, found = gradient(net, lambda m: nt_xent(m(X), LABELS))
    assert off_by(found, wanted) <= EXACT
    with Chunked(net, size=5):
        _, naive = gradient(net, lambda m: nt_xent(m(X[:5]), LABELS[:5]))
    assert off_by(naive, wanted) > NAIVE
