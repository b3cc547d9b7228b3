"""What may change, be shared or be reached between the two passes: exact or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
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


def double(module: nn.Module) -> nn.Module:
    return module.double()


class TwoBiases(nn.Module):
    """Autograd hands one tensor to both of its biases."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(6, 5)
        self.b, self.c = (nn.Parameter(torch.zeros(5)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x) + (self.b + self.c)


class Summed(TwoBiases):
    """Its gradients are expanded ones, which must not be added to in place."""

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x) * self.b.exp().sum(0) + self.c.sum(0)


@pytest.mark.parametrize("kind", [TwoBiases, Summed])
@pytest.mark.parametrize("size", [1, 8, 21])
def test_shared_gradient_tensors_are_not_added_to_in_place(
    kind: Callable[[], nn.Module], size: int
) -> None:
    net = double(kind())
    _, wanted = gradient(net, step)
    with Chunked(net, size=size):
        assert off_by(gradient(net, step)[1], wanted) <= EXACT
        stores = [p.grad.untyped_storage().data_ptr() for p in net.parameters()]  # type: ignore[union-attr]
        assert len(set(stores)) == len(stores)


def test_adding_in_place_would_count_shared_gradients_twice() -> None:
    net = double(TwoBiases())
    _, wanted = gradient(net, step)
    out = net(X).detach().requires_grad_()
    nt_xent(out, LABELS).backward()
    sums: list[Tensor] = []
    for x, g in zip(X.split(8), out.grad.split(8), strict=True):  # type: ignore[union-attr]
        found = torch.autograd.grad(net(x), list(net.parameters()), g)
        pairs = zip(sums, found, strict=True)
        sums = [t.add_(f) for t, f in pairs] if sums else list(found)
    assert off_by(torch.cat([s.flatten() for s in sums]), wanted) > NAIVE


# ---- between forward and backward ----------------------------------------------------


def test_weights_changed_before_the_backward_pass_are_refused() -> None:
    net = twin(Net())
    with Chunked(net, size=8):
        loss = step(net)
        with torch.no_grad():
            net.head.weight.mul_(2)
        with pytest.raises(TrainkitError, match=r"head\.weight changed"):
            loss.backward()


def test_frozen_weights_changed_before_the_backward_pass_are_refused() -> None:
    net = twin(Net())
    net.head.requires_grad_(False)
    with Chunked(net, size=8):
        loss = step(net)
        net.head.weight.mul_(2)
        with pytest.raises(TrainkitError, match=r"head\.weight changed"):
            loss.backward()


def test_modes_of_the_forward_pass_hold_in_the_backward_pass() -> None:
    net = twin(Net(dropout=0.5))

    def chunked(net: Any) -> Tensor:
        return nt_xent(torch.cat([net(c) for c in X.tensor_split(3)]), LABELS)

    _, wanted = gradient(net, chunked)
    _, other = gradient(net.eval(), step)
    net.train()

    def toggled(net: Any) -> Tensor:
        loss = step(net)
        net.eval()
        return loss

    with Chunked(net, size=8):
        assert off_by(gradient(net, toggled)[1], wanted) <= EXACT
        assert not net.training
        assert not net.body[3].training
    assert off_by(other, wanted) > NAIVE


def test_gan_with_both_nets_cut_and_the_critic_frozen_for_a_while() -> None:
    def train(makers: tuple[nn.Module, nn.Module], *, cut: bool) -> Tensor:
        maker, critic = makers
        cuts = [Chunked(each, size=5) for each in makers] if cut else []
        options = [torch.optim.SGD(each.parameters(), lr=0.3) for each in makers]
        for _ in range(3):
            critic.requires_grad_(False)
            loss = critic(maker(X).tanh().repeat(1, 2)[:, :6]).mean(0).square().sum()
            critic.requires_grad_(True)  # before the backward pass: it held at forward
            options[0].zero_grad()
            loss.backward()
            options[0].step()
            assert all(p.grad is None or not p.grad.any() for p in critic.parameters())
            fake = maker(X).detach().tanh().repeat(1, 2)[:, :6]
            options[1].zero_grad()
            (critic(X).std(0).sum() - critic(fake).std(0).sum()).backward()
            options[1].step()
            options[1].zero_grad()
        for each in cuts:
            each.remove()
        return torch.cat([p.detach().flatten() for m in makers for p in m.parameters()])

    begin = twin(Net()), twin(Net(seed=1))
    start = torch.cat([p.detach().flatten() for m in begin for p in m.parameters()])
    wanted = train((twin(begin[0]), twin(begin[1])), cut=False)
    found = train((twin(begin[0]), twin(begin[1])), cut=True)
    assert off_by(found, wanted) <= EXACT
    assert off_by(start, wanted) > NAIVE


def test_an_argument_changed_before_the_backward_pass_raises() -> None:
    net, x = twin(Net()), X.clone()
    with Chunked(net, size=8):
        loss = nt_xent(net(x), LABELS)
        x.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_backward_twice_and_a_second_gradient_is_refused() -> None:
    net = twin(Net())
    _, wanted = gradient(net, step)
    for keep in (0, 1, 9):
        with Chunked(net, size=8, keep=keep):
            net.zero_grad()
            loss = step(net)
            loss.backward(retain_graph=True)
            loss.backward()
            found = torch.cat([p.grad.flatten() for p in net.parameters()])
            assert off_by(found, 2 * wanted) <= EXACT
            x = X.clone().requires_grad_()
            with pytest.raises(TrainkitError, match="create_graph"):
                torch.autograd.grad(net(x).sum(), x, create_graph=True)


# ---- hooks ---------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Its weights are in a list as well."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.view(len(x), 3, 2))[0][:, -1]


@pytest.mark.parametrize("kind", [Net, Recurrent])
@pytest.mark.parametrize("keep", [0, 9])
def test_hooks_on_parameters_fire_once_with_the_sum(kind: Any, keep: int) -> None:
    net = double(kind())
    seen: list[Tensor] = []
    after: list[Tensor] = []
    for each in net.parameters():
        each.register_hook(lambda g: seen.append(g.clone()) or 2 * g)
        each.register_post_accumulate_grad_hook(lambda p: after.append(p.grad.clone()))
    _, wanted = gradient(net, step)
    counts = len(seen), len(after)
    singly = sum(map(torch.Tensor.sum, seen))
    seen.clear()
    after.clear()
    with Chunked(net, size=4, keep=keep):
        assert off_by(gradient(net, step)[1], wanted) <= EXACT
    assert (len(seen), len(after)) == counts
    torch.testing.assert_close(sum(map(torch.Tensor.sum, seen)), singly)


def test_hooks_would_fire_for_each_chunk_if_they_were_not_held_back() -> None:
    net, seen = twin(Net()), []
    net.head.weight.register_hook(seen.append)
    for x in X.split(4):
        torch.autograd.grad(net(x).sum(), list(net.parameters()))
    assert len(seen) == 6


def test_a_result_of_parameters_that_was_made_before_is_refused() -> None:
    class Cached(Net):
        cached: list[Tensor]

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.cached[0]

    def made_before(net: Any) -> Tensor:
        net.cached = [net.head.bias + 0]
        return step(net)

    net = twin(Cached())
    with Chunked(net, size=8), pytest.raises(TrainkitError, match="neither"):
        gradient(net, made_before)


# ---- tensors reached by other ways ---------------------------------------------------


class Reaching(nn.Module):
    """Its output depends on a tensor that is neither a parameter nor an argument."""

    def __init__(self, reach: Callable[[], Tensor], *, frozen: bool) -> None:
        super().__init__()
        self.net = Net().requires_grad_(not frozen)
        self.reach = reach

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.reach()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("is_leaf", [False, True])
@pytest.mark.parametrize("late", [0, 5])
def test_foreign_tensors_are_refused(frozen: bool, is_leaf: bool, late: int) -> None:
    scale = nn.Parameter(torch.ones((), dtype=torch.float64), requires_grad=not late)
    net = double(Reaching(lambda: scale if is_leaf else scale * 2, frozen=frozen))
    with Chunked(net, size=8):
        for _ in range(late):  # unfrozen when the first calls are over
            if not frozen:
                step(net).backward()
            step(net)
        scale.requires_grad_()
        with pytest.raises(TrainkitError, match="neither"):
            step(net).backward()


def test_a_foreign_tensor_would_get_no_gradient() -> None:
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    net = double(Reaching(lambda: scale, frozen=False))
    found = torch.autograd.grad(step(net), [*net.parameters(), scale])
    assert found[-1] != 0


def test_a_leaf_made_anew_in_each_run_is_no_foreign_tensor() -> None:
    class Anew(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + torch.zeros_like(x).requires_grad_())

    net = twin(Anew())
    _, wanted = gradient(net, step)
    with Chunked(net, size=8):
        for _ in range(4):
            assert off_by(gradient(net, step)[1], wanted) <= EXACT
        net.requires_grad_(False)
        for _ in range(4):
            step(net)


def test_functional_call_is_refused_once_the_module_has_its_own_parameters() -> None:
    net = twin(Net())
    others = {k: v.detach().clone().requires_grad_() for k, v in net.named_parameters()}
    with Chunked(net, size=8):
        loss = nt_xent(torch.func.functional_call(net, others, (X,)), LABELS)
        with pytest.raises(TrainkitError, match="functional_call"):
            loss.backward()
        with pytest.raises(TrainkitError, match=r"torch\.func"):
            torch.func.grad(
                lambda p: torch.func.functional_call(net, p, (X,)).sum(),
            )(others)


class Leaving(Net):
    """It leaves a tensor that has a gradient outside its outputs."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.kept = place, []

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.place == "attribute":
            self.aux = out.square().mean()
        elif self.place == "list":
            self.kept = [out.square().mean()]
        return out


@pytest.mark.parametrize(
    ("place", "named"),
    [("attribute", "in aux,"), ("list", "in a list,"), ("hook", "in a list, a hook")],
)
def test_tensors_with_a_gradient_left_outside_the_outputs_are_refused(
    place: str, named: str
) -> None:
    net, found = twin(Leaving(place)), []
    if place == "hook":
        net.head.register_forward_hook(lambda m, a, out: found.append(out.exp()))
    with Chunked(net, size=8), pytest.raises(TrainkitError, match=named):
        step(net)


@pytest.mark.parametrize("make", [torch.exp, torch.t])
def test_results_of_weights_kept_for_all_calls_are_refused(make: Any) -> None:
    """Made in a chunk without a graph, they would take the weights' gradient."""

    class Keeping(Net):
        kept: Any = None

        def forward(self, x: Tensor) -> Tensor:
            if self.kept is None:
                self.kept = make(self.body[0].weight)
            return super().forward(x) + self.kept.sum()

    net = twin(Keeping())
    _, wanted = gradient(net, step)
    net.kept = None
    with torch.no_grad():
        net(X[:2])
    assert off_by(gradient(net, step)[1], wanted) > NAIVE
    net.kept = None
    with Chunked(net, size=8), pytest.raises(TrainkitError, match="gradient in kept"):
        step(net)


def test_a_loss_left_in_an_attribute_would_be_the_last_chunk_s() -> None:
    net = twin(Leaving("attribute"))
    _, wanted = gradient(net, lambda net: (net(X), net.aux)[1])
    _, last = gradient(net, lambda net: [(net(c), net.aux)[1] for c in X.split(8)][-1])
    assert off_by(last, wanted) > NAIVE
