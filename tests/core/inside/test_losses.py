"""A module in chunks has the whole batch's loss and gradient, whatever the loss; it is
copied, saved, removed and interrupted like any other."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.core.inside.common import (
    EXACT,
    LABELS,
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
from trainkit import Chunked, TrainkitError


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
def test_dropout_equals_that_of_chunks_in_one_graph(dropout: float, calls: int) -> None:
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


def test_copies_run_themselves_and_not_the_original() -> None:
    net = twin(Net())
    _, wanted = gradient(net, step)
    cut = Chunked(net, size=4)
    step(net)  # no backward pass: it holds graphs and states
    pickled = pickle.loads(pickle.dumps(net))
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copy.deepcopy(net), pickled, loaded, copy.deepcopy(cut)):
        net.zero_grad()
        with torch.no_grad():
            for each in other.parameters():
                each.mul_(1.5)
        _, found = gradient(other, step)
        assert all(each.grad is None for each in net.parameters())
        plain = twin(Net())
        plain.load_state_dict(other.state_dict())
        assert off_by(found, gradient(plain, step)[1]) <= EXACT
    assert off_by(gradient(net, step)[1], wanted) <= EXACT
    assert (
        pickle.loads(pickle.dumps(cut)).state_dict().keys() == net.state_dict().keys()
    )


def test_copies_can_be_cut_anew() -> None:
    net = twin(Net())
    _, wanted = gradient(net, step)
    first = Chunked(net, size=4)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert off(other, wanted=wanted, size=3) <= EXACT
        assert "forward" not in vars(other)
    with pytest.raises(TrainkitError, match="it runs in chunks already"):
        Chunked(net, size=3)
    for _ in range(2):
        first.remove()
    assert "forward" not in vars(net)


def test_names_of_parameters_stay() -> None:
    net = twin(Net())
    names = list(net.state_dict())
    model: Any = nn.Module()
    model.net = Chunked(net, size=4)
    assert list(net.state_dict()) == names
    assert list(model.state_dict()) == [f"net.{each}" for each in names]
    assert [n for n, _ in model.named_parameters()] == [f"net.{n}" for n in names]
    model.load_state_dict({k: v * 0 for k, v in model.state_dict().items()})
    assert not net.head.weight.any()
    assert model.float().net(X.float()).dtype == torch.float32
    assert not model.eval().net.training
    assert not net.body[3].training


def test_extra_state_of_a_module_is_saved_and_loaded() -> None:
    class Stateful(Net):
        def get_extra_state(self) -> int:
            return self.count

        def set_extra_state(self, state: int) -> None:
            self.count = state

    net: Any = Stateful(count=3)
    cut = Chunked(net, size=4)
    state = cut.state_dict()
    net.count = 0
    cut.load_state_dict(state)
    assert state["_extra_state"] == net.count == 3


def test_a_forward_of_the_instance_is_cut_and_given_back() -> None:
    net = twin(Net())
    net.forward = lambda x: Net.forward(net, 2 * x)
    assert off(net) <= EXACT
    assert vars(net)["forward"].__name__ == "<lambda>"


def test_hooks_on_the_module_run_once() -> None:
    net, runs, inner, backwards = twin(Net()), [], [], []
    net.register_forward_pre_hook(lambda m, a: runs.append(len(a[0])))
    net.register_forward_hook(lambda m, a, out: runs.append(len(out)))
    net.register_full_backward_hook(lambda m, i, o: backwards.append(len(o[0])))
    net.head.register_forward_hook(lambda m, a, out: inner.append(len(out)))
    x = X.clone().requires_grad_()
    made = lambda net: nt_xent(net(x), LABELS)  # noqa: E731
    _, wanted = gradient(net, made)
    with Chunked(net, size=8):
        for _ in range(2):
            gradient(net, made)
        for each in (runs, inner, backwards):
            each.clear()
        assert off_by(gradient(net, made)[1], wanted) <= EXACT
    assert runs == [22, 22]
    assert backwards == [22]
    assert len(inner) == 5  # three chunks, and two of them again


def test_an_error_inside_leaves_everything_as_it_was() -> None:
    fails = 0

    class Failing(Net):
        def forward(self, x: Tensor) -> Tensor:
            if fails and torch.is_grad_enabled() == (fails == 2):
                raise ValueError("no luck")
            return super().forward(x)

    net = twin(Failing(dropout=0.5))
    with Chunked(net, size=8):
        _, wanted = gradient(net, step)
        _, wanted = gradient(net, step)
        fails = 1
        with pytest.raises(ValueError, match="no luck"):
            step(net)
        fails = 0
        loss = step(net)
        fails = 2
        net.eval()
        with pytest.raises(ValueError, match="no luck"):
            loss.backward()
        assert not net.body[3].training
        net.train()
        fails = 0
        assert off_by(gradient(net, step)[1], wanted) <= EXACT


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "8"])
def test_sizes_that_are_no_whole_numbers_are_refused(size: Any) -> None:
    with pytest.raises(TrainkitError, match="size"):
        Chunked(Net(), size=size)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TrainkitError, match="received function"):
        Chunked(step, size=8)  # type: ignore[arg-type]
