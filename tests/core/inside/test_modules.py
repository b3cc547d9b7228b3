"""A module in chunks is copied, saved, removed and interrupted like any other; a
refusal says what to do, and what it says helps."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.core.inside.common import (
    CLASSES,
    EXACT,
    LABELS,
    Net,
    X,
    gradient,
    nt_xent,
    off,
    off_by,
    refused,
    step,
    twin,
)
from trainkit import Chunked, TrainkitError
from trainkit.core.inside.forward import ChunkedForward
from trainkit.core.inside.rows import Sizes


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
    again = pickle.loads(pickle.dumps(cut))
    assert again.state_dict().keys() == net.state_dict().keys()


def test_what_runs_in_chunks_is_not_cut_anew() -> None:
    net = twin(Net())
    first = Chunked(net, size=4)
    for each in (net, copy.deepcopy(net)):
        with pytest.raises(TrainkitError, match="it runs in chunks already"):
            Chunked(each, size=3)
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


# ---- refusals ------------------------------------------------------------------------


def force(net: Any, x: Tensor, is_right: bool = False) -> Tensor:
    """The gradient of an energy, which trains its weights."""
    with torch.set_grad_enabled(is_right or torch.is_grad_enabled()):
        x = x.detach().requires_grad_()
        energy = net.plain(x).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


@dataclass
class Case:
    """A call that is refused, the words, and one that the words lead to."""

    net: nn.Module
    call: Callable[[Any], Any]
    words: str
    better: Callable[[Any], Tensor] | None = None


CASES: dict[str, Case] = {
    "list of samples": Case(
        Net(lambda net, x: net.plain(torch.stack(list(x)))),
        lambda net: net(list(X)),
        "stack lists of samples",
        lambda net: net(X),
    ),
    "force": Case(
        Net(force),
        lambda net: net(X),
        r"fewer rows: .*write torch.enable_grad\(\) around autograd.grad",
        lambda net: net(X, is_right=True),
    ),
    "links": Case(
        Net(lambda net, x, links: net.plain(x + x[links])),
        lambda net: net(X, torch.full((22,), 19)),
        "it does not run on fewer rows: IndexError.* in shared= the",
    ),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_refusal_says_what_to_do_and_that_helps(kind: str) -> None:
    case = CASES[kind]
    with Chunked(twin(case.net), size=4) as net:
        with pytest.raises(TrainkitError, match=f"(?s)Chunked.*{case.words}"):
            case.call(net)
    if case.better is not None:
        better = case.better
        assert off(twin(case.net), lambda net: better(net).std()) <= EXACT


def test_a_loss_among_the_outputs_names_a_module_within() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.head = Net(), nn.Linear(5, 5)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            out = self.head(self.model(x))
            return {"out": out, "loss": out.square().mean()}

    net = twin(WithLoss())
    refused(net, "'loss', of shape .*Compute that outside of it, .* such as 'model'", X)
    assert off(net, lambda net: net(X)["loss"], of=net.model) <= EXACT


def test_kinds_of_rows_that_cannot_be_cut_are_refused() -> None:
    conv = nn.Conv2d(3, 4, 3)
    detector = nn.Module()
    detector.forward = lambda images: torch.stack(  # type: ignore[method-assign]
        [conv(each[None])[0].mean((1, 2)) for each in images]
    )
    images = [torch.randn(3, 8 + i, 8) for i in range(4)]
    refused(detector, "does not run on", images, size=2)
    nested = torch.nested.nested_tensor(list(torch.randn(3, 2, 6)), layout=torch.jagged)
    for kind in (nested, torch.randn(22, 6).to_sparse()):
        with Chunked(nn.Linear(6, 5), size=2) as linear:
            with pytest.raises(TrainkitError, match="input is a .* tensor"):
                linear(kind)
    with pytest.raises(TrainkitError, match="none of its arguments has rows"):
        ChunkedForward(nn.Linear(6, 5), "net", Sizes(1)).probe(torch.randn(1, 6))
    with pytest.raises(TrainkitError, match="it has lazy parameters"):
        Chunked(nn.LazyLinear(5), size=2)
    for shared in ("tables", ["tables"]):
        with pytest.raises(TrainkitError, match=r"'tables'.*input"):
            Chunked(nn.Linear(6, 5), size=2, shared=shared)
    embedding = nn.Embedding(9, 5, max_norm=0.5)
    refused(embedding, "moved weight", torch.arange(9))


def test_batch_norm_is_refused_in_training_and_exact_in_evaluation() -> None:
    net = nn.Sequential(Net(), nn.BatchNorm1d(CLASSES)).double()
    net[1].eval()
    assert off(net) <= EXACT
    with Chunked(net, size=8):
        for _ in range(3):
            step(net)
        net.train()  # after the first calls, too
        with pytest.raises(TrainkitError, match="1 is a BatchNorm that normalises"):
            step(net)
