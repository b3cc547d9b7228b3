"""What is right, if unusual, runs in chunks without a word."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.core.inside.common import (
    EXACT,
    WIDTH,
    Net,
    batch,
    gradient,
    nt_xent,
    off_by,
    twin,
)
from trainkit import Chunked

X, LABELS = batch(16)


def step(net: Any) -> Tensor:
    return nt_xent(net(X), LABELS)


class Sparse(Net):
    """Multiplies each row by a sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mesh", torch.eye(WIDTH).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        mesh: Any = self.mesh
        return super().forward((mesh @ x.T).T)


class Sloped(Net):
    """Takes the slope of its own body for each row."""

    def forward(self, x: Tensor) -> Tensor:
        slopes = torch.func.vmap(torch.func.jacrev(self.body))(x)
        return self.head(slopes.sum(-1))


@pytest.fixture
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.usefixtures("_no_warnings")
@pytest.mark.parametrize("make", [Sparse, Sloped])
def test_sparse_operators_and_slopes_within(make: Callable[[], nn.Module]) -> None:
    net = twin(make())  # type: ignore[arg-type]
    _, wanted = gradient(net, step)
    with Chunked(net, size=4):
        assert off_by(gradient(net, step)[1], wanted) <= EXACT


class Half(Net):
    """Computes in half precision, and returns the precision of its input."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


class Trains(Net):
    """Draws, and has no other mode."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            raise RuntimeError("it only trains")
        return super().forward(x)


def test_half_precision_within_is_no_mixing() -> None:
    for seed in range(4):
        net = Half(seed=seed)
        with Chunked(net, size=4):
            net(X.float())


def test_a_module_that_cannot_evaluate() -> None:
    net = twin(Trains())
    with Chunked(net, size=4):
        gradient(net, step)
