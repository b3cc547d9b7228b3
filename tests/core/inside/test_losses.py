"""A module in chunks has the whole batch's loss and gradient, whatever the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.core.inside.common import (
    EXACT,
    LOSSES,
    NAIVE,
    Loss,
    Net,
    batch,
    gradient,
    off_by,
    twin,
)
from trainkit import Chunked


def whole_step(loss: Loss, calls: int):
    """A step that calls the net once, on two views, or a third time for a target."""
    x, labels = batch()

    def step(net: Any) -> Tensor:
        out = net(x)
        if calls > 1:
            out = out + net(x.flip(1))
        if calls > 2:
            out = out * net(x.roll(1, 1)).sigmoid()
        return loss(out, labels)

    return step


@pytest.mark.parametrize("calls", [1, 2, 3])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_gradient_in_chunks_equals_the_whole_batch(loss: Loss, calls: int) -> None:
    net, step = twin(Net()), whole_step(loss, calls)
    wanted_loss, wanted = gradient(net, step)
    for size in (1, 4, 21):
        with Chunked(net, size=size):
            for _ in range(3):  # the checks of the first calls, and without them
                found_loss, found = gradient(net, step)
                assert abs(found_loss / wanted_loss - 1) <= EXACT
                assert off_by(found, wanted) <= EXACT


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_mean_of_micro_batches_is_not_the_whole_batch(loss: Loss) -> None:
    net, (x, labels) = twin(Net()), batch()
    _, wanted = gradient(net, lambda net: loss(net(x), labels))

    def naive(net: Any) -> Tensor:
        parts = zip(x.split(18), labels.split(18), strict=True)
        return torch.stack([loss(net(a), b) for a, b in parts]).mean()

    assert off_by(gradient(net, naive)[1], wanted) > NAIVE


@pytest.mark.parametrize("size", [1, 4, 21])
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_dropout_in_chunks_equals_the_same_chunks_in_one_graph(
    calls: int, size: int
) -> None:
    net = twin(Net(dropout=0.5))
    x, labels = batch()
    views = [x, x.flip(1), x.roll(1, 1)][:calls]
    loss = LOSSES[2]

    def plain(net: Any) -> Tensor:
        num = -(-len(x) // size)
        outs = [torch.cat([net(c) for c in v.tensor_split(num)]) for v in views]
        return loss(torch.stack(outs).prod(0), labels)

    def step(net: Any) -> Tensor:
        return loss(torch.stack([net(v) for v in views]).prod(0), labels)

    wanted_loss, wanted = gradient(net, plain)
    after = torch.get_rng_state()
    other = gradient(net, plain, seed=4)[1]
    with Chunked(net, size=size):
        for _ in range(3):
            found_loss, found = gradient(net, step)
            torch.testing.assert_close(found_loss, wanted_loss, rtol=EXACT, atol=EXACT)
            assert off_by(found, wanted) <= EXACT
            assert torch.equal(torch.get_rng_state(), after)
    assert off_by(other, wanted) > NAIVE  # the draws matter


def test_float32_is_off_by_rounding() -> None:
    (x, labels), net = batch(), Net()
    step = lambda net: LOSSES[2](net(x.float()), labels)  # noqa: E731
    _, wanted = gradient(net, step)
    with Chunked(net, size=3):
        assert off_by(gradient(net, step)[1], wanted) <= 2e-5


def test_the_whole_batch_keeps_no_graph_of_all_rows() -> None:
    rows_with_graph: list[int] = []

    class Counting(Net):
        def forward(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                rows_with_graph.append(len(x))
            return super().forward(x)

    net, (x, labels) = twin(Counting()), batch(64)
    with Chunked(net, size=4):
        gradient(net, lambda net: LOSSES[0](net(x), labels))
    assert max(rows_with_graph) == 4
