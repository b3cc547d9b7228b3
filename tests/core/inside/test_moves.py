"""What a forward pass moves is refused; what it draws comes again."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.core.inside.common import (
    EXACT,
    NAIVE,
    Net,
    batch,
    gradient,
    nt_xent,
    off_by,
    twin,
)
from trainkit import Chunked, TrainkitError

X, LABELS = batch()


def step(net: Any) -> Tensor:
    return nt_xent(net(X), LABELS)


class Moving(Net):
    """Its forward pass moves something."""

    mean: Any

    def __init__(self, move: str) -> None:
        super().__init__()
        self.move = move
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.move == "buffer":
            self.mean.mul_(0.9).add_(x.detach().mean(0))
        elif self.move == "binding":
            self.mean = 0.9 * self.mean
        elif self.move == "weight":
            with torch.no_grad():
                self.head.weight.clamp_(-1, 1)
        elif self.move == "argument":
            x.mul_(2)
        return super().forward(x + self.mean)


@pytest.mark.parametrize(
    ("move", "named"),
    [
        ("buffer", "moved mean"),
        ("binding", "moved mean"),
        ("weight", r"moved head\.weight"),
        ("argument", "arguments in place"),
    ],
)
@pytest.mark.parametrize("late", [0, 5])
def test_a_forward_pass_that_moves_something_is_refused(
    move: str, named: str, late: int
) -> None:
    net, x = twin(Moving(move if not late else "")), X.clone()
    with Chunked(net, size=8):
        for _ in range(late):
            nt_xent(net(x), LABELS).backward()
        net.move = move
        with pytest.raises(TrainkitError, match=named):
            net(x)
    assert late or torch.equal(x, X)


def test_spectral_norm_is_refused_and_weight_norm_is_exact() -> None:
    net = twin(Net())
    nn.utils.parametrizations.weight_norm(net.head)
    _, wanted = gradient(net, step)
    with Chunked(net, size=8):
        assert off_by(gradient(net, step)[1], wanted) <= EXACT
    net = twin(Net())
    nn.utils.parametrizations.spectral_norm(net.head)
    with Chunked(net, size=8), pytest.raises(TrainkitError, match=r"moved head.*_u"):
        step(net)
    net.eval()
    _, wanted = gradient(net, step)
    with Chunked(net, size=8):
        assert off_by(gradient(net, step)[1], wanted) <= EXACT


def test_parametrizations_cached_around_the_step_are_refused() -> None:
    net = twin(Net())
    nn.utils.parametrizations.weight_norm(net.head)
    with Chunked(net, size=8), nn.utils.parametrize.cached():
        with pytest.raises(TrainkitError, match="gradient in"):
            step(net)


# ---- draws ---------------------------------------------------------------------------


class Noisy(Net):
    """It multiplies its rows by random numbers from one generator."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.own: Any = None
        if source in ("private", "hidden"):
            self.own = torch.Generator().manual_seed(5)
        if source == "hidden":
            self.own = [self.own]
        if source == "numpy generator":
            self.own = np.random.default_rng(5)

    def forward(self, x: Tensor) -> Tensor:
        shape, draws = (len(x), 1), None
        if self.source == "numpy":
            draws = torch.from_numpy(np.random.rand(*shape))
        elif self.source == "numpy generator":
            draws = torch.from_numpy(self.own.random(shape))
        elif self.source == "python":
            draws = torch.tensor([[random.random()] for _ in x], dtype=x.dtype)
        elif self.source:
            own = self.own[0] if self.source == "hidden" else self.own
            draws = torch.rand(shape, generator=own, dtype=x.dtype)
        return super().forward(x if draws is None else x * draws)


def chunked_step(net: Any) -> Tensor:
    np.random.seed(3)
    random.seed(3)
    return nt_xent(torch.cat([net(c) for c in X.tensor_split(3)]), LABELS)


def cut_step(net: Any) -> Tensor:
    np.random.seed(3)
    random.seed(3)
    return step(net)


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("late", [0, 5])
@pytest.mark.parametrize("source", ["numpy", "python"])
def test_draws_of_all_generators_come_again(source: str, late: int, keep: int) -> None:
    def fresh(source: str) -> Any:
        return twin(Noisy(source))

    reference, net = fresh(source), fresh(source)
    _, wanted = gradient(reference, chunked_step)
    after = random.random(), np.random.rand()
    _, other = gradient(reference, lambda net: net.head.bias.sum() + chunked_step(net))
    with Chunked(net, size=8, keep=keep):
        net.source = "" if late else source
        for _ in range(late):
            gradient(net, cut_step)
        net.source = source
        assert off_by(gradient(net, cut_step)[1], wanted) <= EXACT
        assert (random.random(), np.random.rand()) == after
    assert off_by(other, wanted) > NAIVE


@pytest.mark.parametrize("late", [0, 5])
@pytest.mark.parametrize("source", ["private", "hidden", "numpy generator"])
def test_a_generator_of_its_own_is_refused(source: str, late: int) -> None:
    net = twin(Noisy(source))
    with Chunked(net, size=8, keep=0):
        net.source = "" if late else source
        for _ in range(late):
            gradient(net, step)
        net.source = source
        with pytest.raises(TrainkitError, match="another one each time"):
            step(net)


def test_dropout_in_functions_comes_again() -> None:
    class Functional(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(F.dropout(x, 0.5))

    net = twin(Functional())
    _, wanted = gradient(net, chunked_step)
    with Chunked(net, size=8):
        assert off_by(gradient(net, cut_step)[1], wanted) <= EXACT
