"""Autocast, half precision, scalers, checkpoints, offloading and compiling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.core.inside.common import (
    EXACT,
    LABELS,
    NAIVE,
    Net,
    X,
    batch,
    gradient,
    in_parts,
    nt_xent,
    off,
    off_by,
    refused,
    step,
    twin,
)
from trainkit import Chunked, TrainkitError

Make = Callable[[Any], Tensor]

# ---- autocast ------------------------------------------------------------------------


def cast(make: Make, cached: bool = True) -> Make:
    def within(net: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            return make(net)

    return within


@pytest.mark.parametrize("cached", [False, True])
def test_autocast_holds_in_the_second_pass(cached: bool) -> None:
    """The gradient is that of the same chunks in one graph, to the rounding of their
    sums; without autocast in the second pass it would be the float32 one."""
    net = Net()
    _, wanted = gradient(net, cast(in_parts, cached))
    rounding = off_by(wanted, gradient(net, step)[1])
    assert rounding > NAIVE
    found = off(net, cast(step, cached), wanted=wanted, size=4)
    assert found <= rounding / 2


def test_weights_cast_without_a_graph_do_not_serve_the_loss() -> None:
    """A weight used inside and in the loss: autocast keeps its cast, made inside."""

    @cast
    def tied(net: Any) -> Tensor:
        return nt_xent(F.linear(net(X.float()), net.head.weight.T), LABELS)

    net = Net()
    _, wanted = gradient(net, tied)
    net.head.weight.requires_grad_(False)
    _, without = gradient(net, tied)
    net.head.weight.requires_grad_(True)
    assert off(net, tied, wanted=wanted, size=4) <= 0.05
    assert off_by(without, wanted) > 0.2


# ---- half precision ------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 8, 64])
def test_gradients_of_half_precision_are_added_up_in_float32(size: int) -> None:
    x, labels = batch(256)
    exact = twin(Net().bfloat16())
    _, wanted = gradient(exact, lambda net: F.cross_entropy(net(x), labels))
    net = Net().bfloat16()

    def half(net: Any) -> Tensor:
        return F.cross_entropy(net(x.bfloat16()).float(), labels)

    def naive(net: Any) -> Tensor:
        net.zero_grad()
        out = net(x.bfloat16()).detach().requires_grad_()
        F.cross_entropy(out.float(), labels).backward()
        for part, g in zip(x.bfloat16().split(1), out.grad.split(1), strict=True):
            net(part).backward(g)  # adds up in bfloat16
        return torch.cat([p.grad.flatten() for p in net.parameters()]).double()

    whole = off_by(gradient(net, half)[1].double(), wanted)
    with Chunked(net, size=size):
        found = gradient(net, half)[1]
    assert found.dtype == torch.bfloat16
    assert off_by(found.double(), wanted) <= 1.3 * whole
    assert off_by(naive(net), wanted) > 1.3 * whole


# ---- checkpoints and offloading ------------------------------------------------------


def checkpointed(net: Any, x: Tensor) -> Tensor:
    return net.head(checkpoint(net.body, x, use_reentrant=net.reentrant))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpoints_inside(dropout: float) -> None:
    net = twin(Net(checkpointed, dropout=dropout, reentrant=False))
    _, wanted = gradient(net, in_parts)
    assert off(net, wanted=wanted) <= EXACT
    net.reentrant = True
    refused(net, "use_reentrant=False", X.clone().requires_grad_())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_around(reentrant: bool) -> None:
    net, x = twin(Net(dropout=0.5)), X.clone().requires_grad_()
    _, wanted = gradient(net, in_parts)

    def around(net: Any) -> Tensor:
        return nt_xent(checkpoint(net, x, use_reentrant=reentrant), LABELS)  # type: ignore[arg-type]

    assert off(net, around, wanted=wanted) <= EXACT


def test_offloading_around() -> None:
    with torch.autograd.graph.save_on_cpu():
        assert off(twin(Net())) <= EXACT


# ---- compiling -----------------------------------------------------------------------


@pytest.fixture
def compiler() -> Any:
    torch._dynamo.reset()
    yield lambda what: torch.compile(what, backend="aot_eager")
    torch._dynamo.reset()


class Counting(Net):
    """Notes how many rows it sees."""

    rows: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        self.rows = (*self.rows, len(x))
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("in_place", [False, True])
def test_what_is_compiled_around_runs_the_module_in_chunks_uncompiled(
    in_place: bool, compiler: Any
) -> None:
    """A step, or the module itself by `compile()`."""
    net = twin(Counting())
    _, wanted = gradient(net, step)
    compiled = step if in_place else compiler(step)
    if in_place:
        net.compile(backend="aot_eager")
    assert off(compiler(net), wanted=wanted, size=8) <= EXACT
    net.rows = ()
    made = lambda net: compiled(net)  # noqa: E731
    assert off(net, made, wanted=wanted, size=8) <= EXACT
    assert max(net.rows) <= 16  # two chunks are compared at first


def test_what_was_scripted_is_refused() -> None:
    with pytest.warns(DeprecationWarning, match="jit"):
        scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(TrainkitError, match="scripted"):
        Chunked(scripted, size=2)
