"""Autocast, half precision, scalers, checkpoints, offloading and compiling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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
    return nt_xent(net(X.to(next(net.parameters()).dtype)), LABELS)


def chunked(net: Any) -> Tensor:
    x = X.to(next(net.parameters()).dtype)
    return nt_xent(torch.cat([net(c) for c in x.tensor_split(6)]), LABELS)


# ---- autocast ------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("keep", [0, 1, 9])
def test_autocast_holds_in_the_second_pass(keep: int, cached: bool) -> None:
    """The gradient is that of the same chunks in one graph, to the rounding of their
    sums; without autocast in the second pass it would be the float32 one."""
    net = Net()

    def cast(step: Any) -> Any:
        def within(net: Any) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
                return step(net)

        return within

    _, wanted = gradient(net, cast(chunked))
    _, plain = gradient(net, step)
    rounding = off_by(wanted, plain)
    with Chunked(net, size=4, keep=keep):
        for _ in range(3):
            assert off_by(gradient(net, cast(step))[1], wanted) <= rounding / 2


@pytest.mark.parametrize("keep", [0, 1])
def test_weights_cast_without_a_graph_do_not_serve_the_loss(keep: int) -> None:
    """A weight used inside and in the loss: autocast keeps its cast, made inside."""

    def tied(net: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = net(X.float())
            return nt_xent(F.linear(out, net.head.weight.T), LABELS)

    net = Net()
    _, wanted = gradient(net, tied)
    net.head.weight.requires_grad_(False)
    _, without = gradient(net, tied)
    net.head.weight.requires_grad_(True)
    with Chunked(net, size=4, keep=keep):
        for _ in range(3):
            assert off_by(gradient(net, tied)[1], wanted) <= 0.05
    assert off_by(without, wanted) > 0.2


def test_backward_within_autocast() -> None:
    net = Net()

    def within(net: Any) -> Tensor:
        return step(net) * 1.0

    def found() -> Tensor:
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(2):
                within(net).backward()
        return torch.cat([p.grad.flatten() for p in net.parameters()])  # type: ignore[union-attr]

    wanted = found()
    with Chunked(net, size=4):
        for _ in range(3):
            assert off_by(found(), wanted) <= 0.05


def test_scaler_on_the_cpu() -> None:
    def train(net: Any) -> Tensor:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(step(net)).backward()
            scaler.step(optimizer)
            scaler.update()
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    net = twin(Net())
    start = torch.cat([p.detach().flatten() for p in net.parameters()])
    wanted, other = train(twin(net)), twin(net)
    with Chunked(other, size=4):
        assert off_by(train(other) - start, wanted - start) <= EXACT
        for p in other.parameters():
            p.grad = None
        scaler = torch.amp.GradScaler("cpu", init_scale=1e38)
        scaler.scale(1e300 * step(other)).backward()
        assert not all(p.grad.isfinite().all() for p in other.parameters())  # type: ignore[union-attr]


# ---- half precision ------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 8, 64])
def test_gradients_of_half_precision_are_added_up_in_float32(size: int) -> None:
    x, labels = batch(256)
    exact = twin(Net().bfloat16())
    _, wanted = gradient(exact, lambda net: F.cross_entropy(net(x), labels))
    net = Net().bfloat16()

    def half(net: Any) -> Tensor:
        return F.cross_entropy(net(x.bfloat16()).float(), labels)

    whole = off_by(gradient(net, half)[1].double(), wanted)
    with Chunked(net, size=size):
        found = gradient(net, half)[1]
    assert found.dtype == torch.bfloat16
    assert off_by(found.double(), wanted) <= 1.3 * whole

    def naive(net: Any) -> Tensor:
        net.zero_grad()
        out = net(x.bfloat16()).detach().requires_grad_()
        F.cross_entropy(out.float(), labels).backward()
        for part, g in zip(x.bfloat16().split(1), out.grad.split(1), strict=True):  # type: ignore[union-attr]
            net(part).backward(g)  # adds up in bfloat16
        return torch.cat([p.grad.flatten() for p in net.parameters()]).double()  # type: ignore[union-attr]

    assert off_by(naive(net), wanted) > 1.3 * whole


# ---- checkpoints and offloading ------------------------------------------------------


class Checkpointed(Net):
    """A net with activation checkpoints inside."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.body, x, use_reentrant=self.reentrant)  # type: ignore[assignment]
        return self.head(x)


@pytest.mark.parametrize("keep", [0, 1, 9])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpoints_inside(dropout: float, keep: int) -> None:
    net = twin(Checkpointed(dropout=dropout))
    _, wanted = gradient(net, chunked)
    with Chunked(net, size=4, keep=keep):
        for _ in range(3):
            assert off_by(gradient(net, step)[1], wanted) <= EXACT


def test_reentrant_checkpoints_inside_are_refused() -> None:
    net = twin(Checkpointed())
    net.reentrant = True
    x = X.clone().requires_grad_()
    with (
        Chunked(net, size=4),
        pytest.raises(TrainkitError, match="use_reentrant=False"),
    ):
        net(x)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpoints_around(reentrant: bool, dropout: float) -> None:
    net, x = twin(Net(dropout=dropout)), X.clone().requires_grad_()
    _, wanted = gradient(net, chunked)

    def around(net: Any) -> Tensor:
        return nt_xent(checkpoint(net, x, use_reentrant=reentrant), LABELS)  # type: ignore[arg-type]

    with Chunked(net, size=4):
        for _ in range(3):
            assert off_by(gradient(net, around)[1], wanted) <= EXACT


def test_offloading_and_anomaly_mode_around() -> None:
    net = twin(Net())
    _, wanted = gradient(net, step)
    with Chunked(net, size=4), torch.autograd.graph.save_on_cpu():
        for _ in range(3):
            assert off_by(gradient(net, step)[1], wanted) <= EXACT
        with (
            pytest.warns(UserWarning, match="Anomaly"),
            torch.autograd.detect_anomaly(check_nan=False),
        ):
            assert off_by(gradient(net, step)[1], wanted) <= EXACT


def test_gradients_within_the_forward_pass() -> None:
    """Forces are gradients of energies, and train the weights of these."""

    class Forces(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                energy = super().forward(x).sum()
                (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return force[:, :5]

    net = twin(Forces())
    _, wanted = gradient(net, step)
    for keep in (0, 1, 3):
        with Chunked(net, size=4, keep=keep):
            for _ in range(3):
                assert off_by(gradient(net, step)[1], wanted) <= EXACT


# ---- compiling -----------------------------------------------------------------------


@pytest.fixture
def compiler() -> Any:
    torch._dynamo.reset()
    yield lambda what, **options: torch.compile(what, backend="aot_eager", **options)
    torch._dynamo.reset()


def test_a_compiled_module_in_chunks(compiler: Any) -> None:
    net = twin(Net())
    _, wanted = gradient(net, step)
    compiled = compiler(net)
    with Chunked(compiled, size=8, keep=2):
        for _ in range(3):
            assert off_by(gradient(compiled, step)[1], wanted) <= EXACT


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_compiled_step_runs_the_module_in_chunks_uncompiled(compiler: Any) -> None:
    net = twin(Net())
    _, wanted = gradient(net, step)

    class Counting(Net):
        rows: tuple[int, ...] = ()

        def forward(self, x: Tensor) -> Tensor:
            self.rows = (*self.rows, len(x))
            return super().forward(x)

    net = twin(Counting())
    compiled = compiler(step)
    with Chunked(net, size=8, keep=0):
        for _ in range(3):
            assert off_by(gradient(net, lambda net: compiled(net))[1], wanted) <= EXACT
        assert max(net.rows) <= 16  # two chunks are compared at first


def test_what_was_scripted_or_compiled_in_place_is_refused() -> None:
    with pytest.warns(DeprecationWarning, match="jit"):
        scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(TrainkitError, match="scripted"):
        Chunked(scripted, size=2)
    net = Net()
    net.compile(backend="aot_eager")
    with pytest.raises(TrainkitError, match="compiled in place"):
        Chunked(net, size=2)


def test_autocast_without_the_second_pass_would_be_off() -> None:
    net = Net()
    with torch.autocast("cpu", torch.bfloat16):
        out = net(X.float()).float().detach().requires_grad_()
        nt_xent(out, LABELS).backward()
    _, wanted = gradient(net, step)
    found = torch.autograd.grad(net(X.float()), list(net.parameters()), out.grad)
    assert off_by(torch.cat([f.flatten() for f in found]), wanted) > NAIVE
