"""A refusal of the inner cut says what to do, and what it says helps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from tests.core.inside.common import (
    CLASSES,
    EXACT,
    WIDTH,
    Net,
    X,
    off,
    refused,
    step,
    twin,
)
from trainkit import Chunked, TrainkitError
from trainkit.core.inside.forward import ChunkedForward
from trainkit.core.inside.rows import Sizes


class Last(nn.Module):
    """The last state of a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, 5, batch_first=True)

    def forward(self, given: Any, lengths: Any = None) -> Tensor:
        if lengths is not None:
            given = pack_padded_sequence(given, lengths, True, enforce_sorted=False)
        return self.layer(given)[1][-1]


class Cache:
    """What a decoder returns beside its outputs."""


def decoder(net: Any, x: Tensor, use_cache: bool = True) -> Any:
    return net.plain(x), Cache() if use_cache else None


def force(net: Any, x: Tensor, is_right: bool = False) -> Tensor:
    """The gradient of an energy, which trains its weights."""
    with torch.set_grad_enabled(is_right or torch.is_grad_enabled()):
        x = x.detach().requires_grad_()
        energy = net.plain(x).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


SEQUENCES = torch.randn(16, 7, WIDTH, dtype=torch.float64)
LENGTHS = torch.tensor([7] * 8 + [2] * 8)


@dataclass
class Case:
    """A call that is refused, the words, and one that the words lead to."""

    net: Any
    args: tuple[Any, ...]
    words: str
    better: tuple[Any, ...]
    named: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, Case] = {
    "list of samples": Case(
        lambda: Net(lambda net, x: net.plain(torch.stack(list(x)))),
        (list(X),),
        "If a list holds samples, stack them into one tensor",
        (X,),
    ),
    "packed": Case(
        Last,
        (pack_padded_sequence(SEQUENCES, LENGTHS, True),),
        "A PackedSequence cannot be cut: .* pack them inside the module",
        (SEQUENCES, LENGTHS),
    ),
    "cache": Case(
        lambda: Net(decoder),
        (X,),
        "is a Cache, .* Pass use_cache=False",
        (X,),
        {"use_cache": False},
    ),
    "force": Case(
        lambda: Net(force),
        (X,),
        "fewer rows: .*wrap what calls autograd.grad in torch.enable_grad",
        (X,),
        {"is_right": True},
    ),
    "links": Case(
        lambda: Net(lambda net, x, links: net.plain(x + x[links])),
        (X, torch.full((22,), 19)),
        "it does not run on fewer rows: IndexError.* in shared= the",
        (),
    ),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_refusal_says_what_to_do_and_that_helps(kind: str) -> None:
    case = CASES[kind]
    refused(twin(case.net()), case.words, *case.args)
    if not case.better:
        return

    def helped(net: Any) -> Tensor:
        out = net(*case.better, **case.named)
        return (out[0] if isinstance(out, tuple) else out).std()

    assert off(twin(case.net()), helped) <= EXACT


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
        with pytest.raises(TrainkitError, match=r"BatchNorm normalises.*1"):
            step(net)
