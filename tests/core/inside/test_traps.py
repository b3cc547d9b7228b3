"""What may change, be shared or be reached between the two passes: exact or refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.core.inside.common import (
    EXACT,
    LABELS,
    NAIVE,
    Net,
    X,
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
from trainkit.core.inside import moment

# ---- gradients that are one tensor ---------------------------------------------------


def two_biases(net: Any, x: Tensor) -> Tensor:
    """Autograd hands one tensor to both of its biases."""
    return net.plain(x) + (net.b + net.c)


def summed(net: Any, x: Tensor) -> Tensor:
    """Its gradients are expanded ones, which must not be added to in place."""
    return net.plain(x) * net.b.exp().sum(0) + net.c.sum(0)


def bias() -> Any:
    return nn.Parameter(torch.zeros(5))


@pytest.mark.parametrize(("kind", "size"), [(two_biases, 8), (summed, 1)])
def test_shared_gradients_are_not_added_to_in_place(kind: Any, size: int) -> None:
    net = twin(Net(kind, b=bias(), c=bias()))
    assert off(net, size=size) <= EXACT
    stores = [p.grad.untyped_storage().data_ptr() for p in net.parameters()]
    assert len(set(stores)) == len(stores)


# ---- changed between forward and backward --------------------------------------------


@pytest.mark.parametrize("trains", [True, False])
def test_weights_and_arguments_changed_before_are_refused(trains: bool) -> None:
    net, x = twin(Net()), X.clone()
    net.head.requires_grad_(trains)
    with Chunked(net, size=8):
        loss = nt_xent(net(x), LABELS)
        x.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        loss = step(net)
        with torch.no_grad():
            net.head.weight.mul_(2)
        with pytest.raises(TrainkitError, match=r"head\.weight changed"):
            loss.backward()


def test_a_number_that_changes_before_backward_is_put_back(monkeypatch: Any) -> None:
    net = twin(Net(lambda net, x: net.plain(x) * net.heat, heat=1.0))
    _, wanted = gradient(net, step)

    def cooled(net: Any) -> Tensor:
        net.heat = 1.0
        loss = step(net)
        net.heat = 0.5
        return loss

    assert off(net, cooled, wanted=wanted, times=5, size=4) <= EXACT
    assert net.heat == 0.5
    net.heat = 1.0
    with Chunked(net, size=4):
        for _ in range(2):
            step(net)
        monkeypatch.setattr(moment, "put_back", lambda *_: None)
        # The control, in a call whose chunks are not compared.
        assert off_by(gradient(net, cooled)[1], wanted) > NAIVE


def test_a_tensor_that_is_no_weight_and_changes_before_is_refused() -> None:
    """As the condition of two calls in one step."""
    net = twin(Net(lambda net, x: net.plain(x) * net.held[0]))
    net.held = [torch.ones(())]
    with Chunked(net, size=4):
        loss = step(net)
        net.held = [torch.full((), 2.0)]
        with pytest.raises(TrainkitError, match="gives other outputs when it runs ag"):
            loss.backward()


def test_modes_of_the_forward_pass_hold_in_the_backward_pass() -> None:
    net = twin(Net(dropout=0.5))
    _, wanted = gradient(net, in_parts)
    _, other = gradient(net.eval(), step)

    def toggled(net: Any) -> Tensor:
        net.train()
        loss = step(net)
        net.eval()
        return loss

    assert off(net, toggled, wanted=wanted) <= EXACT
    assert not net.training
    assert not net.body[3].training
    assert off_by(other, wanted) > NAIVE


def test_what_is_frozen_in_the_forward_pass_alone_is_refused() -> None:
    """As the critic of a GAN, which trains again before the backward pass."""
    net = twin(Net())
    with Chunked(net, size=4):
        net.head.requires_grad_(False)
        loss = step(net)
        net.head.requires_grad_(True)
        with pytest.raises(TrainkitError, match="head.weight, head.bias changed"):
            loss.backward()


def test_what_trains_may_change_between_steps() -> None:
    net = twin(Net())
    with Chunked(net, size=4):
        for is_on in (True, False, True):
            net.head.requires_grad_(is_on)
            _, found = gradient(net, step)
            _, wanted = gradient(net, in_parts)
            assert off_by(found, wanted) <= EXACT


def test_backward_twice_and_a_second_gradient_is_refused() -> None:
    net = twin(Net())

    def twice(net: Any) -> Tensor:
        loss = step(net)
        loss.backward(retain_graph=True)
        return loss

    assert off(net, twice, size=8) <= EXACT
    with Chunked(net, size=8):
        x = X.clone().requires_grad_()
        with pytest.raises(TrainkitError, match="create_graph"):
            torch.autograd.grad(net(x).sum(), x, create_graph=True)


# ---- draws ---------------------------------------------------------------------------


def noisy(net: Any, x: Tensor) -> Tensor:
    """Multiplies its rows by random numbers of one generator."""
    if net.source == "numpy":
        return net.plain(x * torch.from_numpy(np.random.rand(len(x), 1)))
    if net.source == "python":
        return net.plain(x * torch.tensor([[random.random()] for _ in x]))
    return net.plain(F.dropout(x, 0.5) if net.source else x)


@pytest.mark.parametrize(
    ("source", "late"), [("numpy", 0), ("python", 5), ("function", 5)]
)
def test_draws_of_all_generators_come_again(source: str, late: int) -> None:
    def seeded(make: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        def run(net: Any) -> Tensor:
            np.random.seed(3)
            random.seed(3)
            return make(net)

        return run

    def other(net: Any) -> Tensor:
        torch.rand(1)
        np.random.rand()
        random.random()
        return in_parts(net)

    net = twin(Net(noisy, source=source))
    _, wanted = gradient(net, seeded(in_parts))
    after = random.random(), np.random.rand()
    assert off_by(gradient(net, seeded(other))[1], wanted) > NAIVE
    net.source = "" if late else source
    with Chunked(net, size=4):
        for _ in range(late):
            gradient(net, step)
        net.source = source
        for _ in range(3):
            assert off_by(gradient(net, seeded(step))[1], wanted) <= EXACT
            assert (random.random(), np.random.rand()) == after


# ---- hooks ---------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Its weights are in a list as well."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.view(len(x), 3, 2))[0][:, -1]


@pytest.mark.parametrize("kind", [Net, Recurrent])
def test_hooks_on_parameters_fire_once_with_the_sum(kind: Any) -> None:
    net = twin(kind())
    seen: list[Tensor] = []
    after: list[Tensor] = []
    for each in net.parameters():
        each.register_hook(lambda g: seen.append(g.clone()) or 2 * g)
        each.register_post_accumulate_grad_hook(lambda p: after.append(p.grad.clone()))
    _, wanted = gradient(net, step)
    counts = len(seen), len(after)
    singly = sum(map(torch.Tensor.sum, seen))
    for x in X.split(4):  # the control: they would fire for each chunk
        torch.autograd.grad(net(x).sum(), list(net.parameters()))
    assert len(seen) == 7 * counts[0]
    seen.clear()
    after.clear()
    assert off(net, wanted=wanted, times=1, size=4) <= EXACT
    assert (len(seen), len(after)) == counts
    torch.testing.assert_close(sum(map(torch.Tensor.sum, seen)), singly)


# ---- tensors reached by other ways ---------------------------------------------------


@pytest.mark.parametrize(
    ("late", "is_leaf", "frozen"),
    [(0, True, False), (0, False, True), (5, False, False), (5, True, True)],
)
def test_foreign_tensors_are_refused(frozen: bool, is_leaf: bool, late: int) -> None:
    scale = nn.Parameter(torch.ones((), dtype=torch.float64), requires_grad=not late)
    net = twin(Net(lambda net, x: net.plain(x) * (scale if is_leaf else scale * 2)))
    net.requires_grad_(not frozen)
    with Chunked(net, size=8):
        for _ in range(late):  # unfrozen when the first calls are over
            if not frozen:
                step(net).backward()
            step(net)
        scale.requires_grad_()
        with pytest.raises(TrainkitError, match="neither"):
            step(net).backward()
    if not frozen:  # the control: it has a gradient, which would be lost
        found = torch.autograd.grad(step(net), [*net.parameters(), scale])
        assert found[-1] != 0


def test_foreign_tensors_that_are_no_parameters_are_refused() -> None:
    """One that trains, and a result of parameters that was made before."""
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    refused(twin(Net(lambda net, x: net.plain(x) * scale)), "neither a parameter of it")
    net = twin(Net(lambda net, x: net.plain(x) + net.cached[0]))
    net.cached = [net.head.bias + 0]
    refused(net, "neither")


def test_functional_call_is_refused_once_the_module_has_its_own_parameters() -> None:
    net = twin(Net())
    others = {k: v.detach().clone().requires_grad_() for k, v in net.named_parameters()}
    with Chunked(net, size=8):
        loss = nt_xent(torch.func.functional_call(net, others, (X,)), LABELS)
        with pytest.raises(TrainkitError, match="functional_call"):
            loss.backward()
        called = lambda p: torch.func.functional_call(net, p, (X,)).sum()  # noqa: E731
        with pytest.raises(TrainkitError, match=r"torch\.func"):
            torch.func.grad(called)(others)


# ---- left outside the outputs --------------------------------------------------------


def leaves(net: Any, x: Tensor) -> Tensor:
    out = net.plain(x)
    term = out.softmax(-1).mean(0).square().sum()
    net.aux = {"list": [term], "dict": {"a": term}}.get(net.place, term)
    return out


@pytest.mark.parametrize(
    ("place", "named"),
    [("attribute", "in aux,"), ("list", "in a list,"), ("dict", "in a list,")],
)
def test_a_term_left_in_an_attribute_is_refused(place: str, named: str) -> None:
    net = twin(Net(leaves, place=place))
    refused(net, named)
    hooked, found = twin(Net()), []
    hooked.head.register_forward_hook(lambda m, a, out: found.append(out.exp()))
    refused(hooked, "in a list, a hook")
    if place == "attribute":  # the control: it would be the last chunk's
        _, wanted = gradient(net, lambda net: (net(X), net.aux)[1])
        parts = X.split(8)
        _, last = gradient(net, lambda net: [(net(c), net.aux)[1] for c in parts][-1])
        assert off_by(last, wanted) > NAIVE


@pytest.mark.parametrize("make", [torch.exp, torch.t])
def test_results_of_weights_kept_for_all_calls_are_refused(make: Any) -> None:
    """Made in a chunk without a graph, they would take the weights' gradient."""

    def keeping(net: Any, x: Tensor) -> Tensor:
        if net.kept is None:
            net.kept = make(net.body[0].weight)
        return net.plain(x) + net.kept.sum()

    net = twin(Net(keeping, kept=None))
    _, wanted = gradient(net, step)
    net.kept = None
    with torch.no_grad():
        net(X[:2])
    assert off_by(gradient(net, step)[1], wanted) > NAIVE
    net.kept = None
    refused(net, "gradient in kept")
