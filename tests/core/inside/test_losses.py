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
    X,
    batch,
    gradient,
    nt_xent,
    off,
    off_by,
    step,
    twin,
    vicreg,
)
from trainkit import Chunked


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
def test_dropout_in_chunks_equals_the_same_chunks_in_one_graph(
    dropout: float, calls: int
) -> None:
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
