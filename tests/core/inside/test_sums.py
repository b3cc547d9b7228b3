"""Gradients are added up where they arrive, and once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.benchmarks.live_bytes import LiveBytes
from tests.core.inside.common import EXACT, Net, batch, gradient, nt_xent, off_by
from trainkit import Chunked
from trainkit.core.inside.cut import Shadows

X, LABELS = batch(24)
WIDTH, LAYERS = 256, 6


class Deep(nn.Module):
    """Layers with far more parameters than a chunk's graph holds."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def peak(size: int | None) -> float:
    """The most bytes of the second step, as a multiple of the parameters'."""
    net, rows = Deep(), torch.randn(16, WIDTH)
    with Chunked(net, size=4, keep=0):
        net(rows).square().mean().backward()  # which looks at rows as well
        net(rows)
        net.zero_grad()
        with LiveBytes() as live:
            if size is None:
                net(rows).square().mean().backward()
            else:  # the control: sums beside each chunk's gradients
                sums = [torch.zeros_like(p) for p in net.parameters()]
                for part in rows.split(size):
                    loss = net(part).square().mean()
                    found = torch.autograd.grad(loss, list(net.parameters()))
                    for one, other in zip(sums, found, strict=True):
                        one.add_(other)
    return live.peak / (4 * sum(p.numel() for p in net.parameters()))


def test_there_is_never_a_second_gradient_of_all_parameters() -> None:
    assert peak(None) < 1.5
    assert peak(4) > 1.9


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

    net = Hungry().double()
    _, wanted = gradient(net, lambda m: nt_xent(m(X), LABELS))
    with Chunked(net, keep=0):
        loss = nt_xent(net(X), LABELS)
        if not again:
            monkeypatch.setattr(Shadows, "clear", lambda _: None)
        monkeypatch.setattr(Stops, "left", 2)
        net.zero_grad()
        loss.backward()
        found = torch.cat([p.grad.flatten() for p in net.parameters()])  # type: ignore[union-attr]
    assert not Stops.left
    assert (off_by(found, wanted) <= EXACT) == again


def test_a_pass_within_the_pass_is_left_alone() -> None:
    torch.manual_seed(0)
    net, x = Within().double(), X[:, :6]
    _, wanted = gradient(net, lambda m: nt_xent(m(x), LABELS))
    with Chunked(net, size=5):
        _, found = gradient(net, lambda m: nt_xent(m(x), LABELS))
        assert off_by(found, wanted) <= EXACT
