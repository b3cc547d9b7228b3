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
from trainkit import Chunked, MicroBatching, TrainkitError

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
@pytest.mark.parametrize("keep", [0, 1, 2, 6, 99])
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
    [(0, 12), (1, 10), (2, 8), (6, 0), (99, 0)],
)
def test_kept_chunks_run_once(keep: Any, second: int) -> None:
    """Two calls of six chunks."""
    net = twin(Counting())
    with Chunked(net, size=4, keep=keep):
        for _ in range(4):
            gradient(net, two_views)  # calls 1, 2, 4 and 8 look at rows as well
        assert passes(net, two_views) == 12 + second


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        ("auto", "'auto' and bytes are no longer known: .* write keep=1"),
        ("2GB", "'auto' and bytes are no longer known"),
        (None, "a whole number, received None"),
        (-1, "keep"),
        (1.5, "keep"),
        (True, "keep"),
    ],
)
def test_what_is_no_number_is_refused(keep: Any, words: str) -> None:
    with pytest.raises(TrainkitError, match=words):
        Chunked(Net(), size=4, keep=keep)
    with pytest.raises(TrainkitError, match=words):
        MicroBatching(size=4, inside="net", keep=keep)
