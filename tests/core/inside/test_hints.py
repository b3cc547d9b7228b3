"""A refusal of the inner cut says what to do, and what it says helps."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from tests.core.inside.common import EXACT, WIDTH, Net, batch, gradient, off_by
from trainkit import Chunked, TrainkitError

X, _ = batch(16)
SEQUENCES = torch.randn(16, 7, WIDTH, dtype=torch.float64)


def train(net: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """The whole batch's gradient, which a cut must have too."""

    def step(net: nn.Module) -> Any:
        out = net(*args, **kwargs)
        return (out[0] if isinstance(out, tuple) else out).std()

    with Chunked(net, size=4):
        found = gradient(net, step)[1]
    assert off_by(found, gradient(net, step)[1]) <= EXACT
    return found


class Images(Net):
    """Gets the samples in a list, or stacked."""

    def forward(self, imgs: Any) -> Tensor:  # type: ignore[override]
        return super().forward(torch.stack(list(imgs)))


class Last(nn.Module):
    """The last state of a recurrent layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, 5, **options)

    def forward(self, given: Any, lengths: Any = None) -> Tensor:
        if lengths is not None:
            given = pack_padded_sequence(given, lengths, True, enforce_sorted=False)
        return self.layer(given)[1][-1]


LENGTHS = torch.tensor([7] * 8 + [2] * 8)


@pytest.mark.parametrize(
    ("net", "given", "words", "better"),
    [
        (
            Images(),
            (list(X),),
            "If a list holds samples, stack them into one tensor",
            (X,),
        ),
        (
            Last(batch_first=True),
            (pack_padded_sequence(SEQUENCES, LENGTHS, True),),
            "A PackedSequence cannot be cut: .* pack them inside the module",
            (SEQUENCES, LENGTHS),
        ),
    ],
)
def test_arguments_that_cannot_be_cut(
    net: nn.Module, given: Any, words: str, better: Any
) -> None:
    net = net.double()
    with pytest.raises(TrainkitError, match=words):
        train(net, *given)
    train(net, *better)


@pytest.mark.parametrize("batch_first", [False, True])
def test_sequences_that_come_first(batch_first: bool) -> None:
    net = Last(batch_first=batch_first).double()
    if batch_first:
        train(net, SEQUENCES)
        return
    words = "Rows must be dimension 0 .* as with batch_first=True"
    with pytest.raises(TrainkitError, match=words):
        train(net, SEQUENCES.transpose(0, 1))


class WithLoss(nn.Module):
    """Returns the loss of its rows beside their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.head = Net(), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out = self.head(self.model(x))
        return {"out": out, "loss": out.square().mean()}


def test_a_loss_among_the_outputs() -> None:
    net = WithLoss().double()
    with (
        Chunked(net, size=4),
        pytest.raises(
            TrainkitError,
            match="'loss', of shape .*Compute that outside of it, .* such as 'model'",
        ),
    ):
        net(X)
    wanted = gradient(net, lambda net: net(X)["loss"])[1]
    with Chunked(net.model, size=4):
        assert off_by(gradient(net, lambda net: net(X)["loss"])[1], wanted) <= EXACT


class Growing(Net):
    """Its table of positions grows with the rows' length."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.table) < x.shape[1]:
            self.table = torch.linspace(0, 1, x.shape[1])
        return super().forward(x * self.table[: x.shape[1], None]).flatten(1)


def test_a_cache_that_grows() -> None:
    net = Growing().double()
    words = "moved table. .* cache, fill it before, by a call with the longest rows"
    with Chunked(net, size=4), pytest.raises(TrainkitError, match=words):
        net(SEQUENCES[:, :3])
    net(SEQUENCES)
    train(net, SEQUENCES[:, :3])


class Cache:
    """What a decoder returns beside its outputs."""


class Decoder(Net):
    def forward(self, x: Tensor, use_cache: bool = True) -> Any:
        return super().forward(x), Cache() if use_cache else None


def test_a_cache_among_the_outputs() -> None:
    net = Decoder().double()
    with pytest.raises(TrainkitError, match="is a Cache, .* Pass use_cache=False"):
        train(net, X)
    train(net, X, use_cache=False)


class Force(Net):
    """Returns the gradient of an energy."""

    is_right = False

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.is_right or torch.is_grad_enabled()):
            x = x.detach().requires_grad_()
            energy = super().forward(x).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]


def test_a_gradient_within_the_forward() -> None:
    net = Force().double()
    words = r"fewer rows: .*wrap what calls autograd.grad in torch.enable_grad"
    with pytest.raises(TrainkitError, match=words):
        train(net, X)
    net.is_right = True
    train(net, X)


class Linked(Net):
    """Reads other rows by their number, or fails at one row."""

    def forward(self, x: Tensor, links: Tensor) -> Tensor:  # type: ignore[override]
        if (links == 99).any():
            raise KeyError(99)
        here = links.clamp_min(0)
        return super().forward(x + (links >= 0)[:, None] * x[here])


def test_an_error_while_few_rows_run_names_the_cut() -> None:
    net, links = Linked().double(), torch.full((16,), -1)
    links[2:14] = 9
    words = r"Chunked\(Linked\): it cannot .* fewer rows: IndexError.* in shared= the"
    with pytest.raises(TrainkitError, match=words):
        train(net, X, links)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes are of 3.11")
def test_an_error_in_a_chunk_has_a_note_of_its_rows() -> None:
    net, links = Linked().double(), torch.full((64,), -1)
    x = batch(64)[0]
    with Chunked(net, size=4):
        net(x, links)
        net(x, links)
        links[13] = 99  # in a call that is not looked at
        with pytest.raises(KeyError) as caught:
            net(x, links)
    (note,) = caught.value.__notes__  # type: ignore[attr-defined]
    assert note == (
        "trainkit | Chunked(Linked): raised while it ran on rows 12 to 15 of 64"
    )
