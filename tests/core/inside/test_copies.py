"""A module in chunks is copied, saved, removed and interrupted like any other."""

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
    Net,
    X,
    gradient,
    nt_xent,
    off,
    off_by,
    step,
    twin,
)
from trainkit import Chunked, TrainkitError


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
