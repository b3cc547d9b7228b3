"""Chunks that keep their graph need no second pass; the gradient is equal for all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.core.inside.common import (
    EXACT,
    Net,
    batch,
    gradient,
    nt_xent,
    off_by,
    twin,
)
from trainkit import Chunked, TrainkitError
from trainkit.core.inside.keep import Keeper, checked_keep

pytestmark = pytest.mark.filterwarnings("ignore:.*leaves values in (passes|rows),")

X, LABELS = batch()


class Counting(Net):
    """Counts its passes with a graph and without."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)
        self.passes: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.passes.append(torch.is_grad_enabled())
        return super().forward(x)


def step(net: Any) -> Tensor:
    return nt_xent(net(X), LABELS)


def two_views(net: Any) -> Tensor:
    return nt_xent(net(X) + net(X.flip(1)), LABELS)


def passes(net: Any, step: Any) -> int:
    net.passes.clear()
    gradient(net, step)
    return len(net.passes)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("keep", [0, 1, 2, 6, 99, "1B", "64KB", "1GB", "auto"])
def test_gradient_is_equal_however_many_are_kept(keep: Any, dropout: float) -> None:
    net = twin(Counting(dropout))

    def chunked(net: Any) -> Tensor:
        outs = [torch.cat([net(c) for c in v.tensor_split(6)]) for v in (X, X.flip(1))]
        return nt_xent(outs[0] + outs[1], LABELS)

    _, wanted = gradient(net, chunked)
    with Chunked(net, size=4, keep=keep):
        for _ in range(3):
            assert off_by(gradient(net, two_views)[1], wanted) <= EXACT


@pytest.mark.parametrize(
    ("keep", "second"),
    [(0, 12), (1, 10), (2, 8), (6, 0), (99, 0), ("1B", 12), ("1GB", 0), ("auto", 11)],
)
def test_kept_chunks_run_once(keep: Any, second: int) -> None:
    """Two calls of six chunks: `auto` keeps the last chunk of the last call."""
    net = twin(Counting())
    with Chunked(net, size=4, keep=keep):
        for _ in range(3):
            gradient(net, two_views)
        assert passes(net, two_views) == 12 + second


def test_auto_finds_the_last_call_anew() -> None:
    net = twin(Counting())

    def with_teacher(net: Any) -> Tensor:
        with torch.no_grad():
            net(X)
        student = net(X)
        with torch.no_grad():
            target = net(X.flip(1))
        return nt_xent(student - target, LABELS)

    with Chunked(net, size=4):
        for _ in range(3):
            gradient(net, two_views)
        for _ in range(3):
            gradient(net, step)
        assert passes(net, step) == 6 + 5
        gradient(net, two_views)
        assert passes(net, two_views) == 12 + 11
        gradient(net, with_teacher)
        assert passes(net, with_teacher) == 18 + 5


def test_auto_keeps_more_while_there_is_room() -> None:
    room = {"bytes": 0}
    net = twin(Counting())
    cut = Chunked(net, size=4)
    cut._cut.keeper = keeper = Keeper(room=lambda device: room["bytes"])
    for _ in range(9):
        gradient(net, step)
    assert passes(net, step) == 6 + 5
    size = 4 * keeper.row_bytes
    assert size
    room["bytes"] = 2 * size + 1
    for _ in range(8):
        gradient(net, step)  # the room is looked at seldom
    room["bytes"] = 0
    assert passes(net, step) == 6 + 3
    room["bytes"] = -size
    for _ in range(20):
        gradient(net, step)
    assert passes(net, step) == 6 + 4
    cut.remove()


def test_without_a_device_auto_keeps_one() -> None:
    net = twin(Counting())
    with Chunked(net, size=4):
        for _ in range(20):
            gradient(net, step)
        assert passes(net, step) == 6 + 5


@pytest.mark.parametrize("keep", ["two", "2 TB", "", -1, 1.5, True, None])
def test_what_is_no_number_and_no_bytes_is_refused(keep: Any) -> None:
    with pytest.raises(TrainkitError, match="keep"):
        checked_keep(keep)
