"""What a module in chunks may return, and what it is refused for."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from transformers.utils.generic import ModelOutput

from tests.core.inside.common import (
    CLASSES,
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
Pair = namedtuple("Pair", ["out", "size"])


@dataclass
class Held:
    out: Tensor
    hidden: Tensor
    nothing: None = None


@dataclass
class Output(ModelOutput):
    out: Tensor | None = None
    hidden: tuple[Tensor, ...] | None = None
    loss: Tensor | None = None


KINDS: dict[str, Any] = {
    "tensor": lambda out: out,
    "tuple": lambda out: (out.sum(1), out, None, 3, "text", True),
    "list": lambda out: [out, {"a": out.exp()}],
    "dict": lambda out: {"hidden": out.tanh(), "out": out, "none": None, "n": 4},
    "namedtuple": lambda out: Pair(out, 3),
    "dataclass": lambda out: Held(out, out.exp()),
    "frozen output": lambda out: (out, out.detach(), (out > 0), out.argmax(1)),
    "model output": lambda out: Output(out=out, hidden=(out.exp(), out * 2)),
    "twice": lambda out: (out, out),
    "view": lambda out: (out, out[:, :2], out.view(-1)),
    "second dimension": lambda out: (out.T.contiguous(), out[None]),
    "flattened": lambda out: out.repeat_interleave(3, 0),
}
WHICH: dict[str, Any] = {
    "tuple": lambda o: o[1] * o[0][:, None],
    "list": lambda o: o[0] + o[1]["a"],
    "dict": lambda o: o["out"] + o["hidden"],
    "namedtuple": lambda o: o.out * o.size,
    "dataclass": lambda o: o.out * o.hidden,
    "frozen output": lambda o: o[0] * o[1] + o[2] + o[3][:, None],
    "model output": lambda o: o.out + o.hidden[0] * o["hidden"][1],
    "twice": lambda o: o[0] * o[1].exp(),
    "view": lambda o: o[0] * o[1].sum(1, keepdim=True) + o[2].view(-1, CLASSES),
    "second dimension": lambda o: o[0].T + o[1][0].exp(),
    "flattened": lambda o: o.view(len(X), 3, -1).prod(1),
}


class Returning(Net):
    """It makes something of its output."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(super().forward(x))


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_of_any_structure(kind: str, size: int) -> None:
    net, use = twin(Returning(KINDS[kind])), WHICH.get(kind, lambda o: o)
    types: list[type] = []

    def step(net: Any) -> Tensor:
        output = net(X)
        types.append(type(output))
        return nt_xent(use(output), LABELS)

    _, wanted = gradient(net, step)
    with Chunked(net, size=size):
        for _ in range(3):
            assert off_by(gradient(net, step)[1], wanted) <= EXACT
    assert len(set(types)) == 1


def test_detached_outputs_and_copies_of_arguments_have_no_gradient() -> None:
    class Mixed(Net):
        def forward(self, x: Tensor) -> Any:
            out = super().forward(x)
            return out, out.detach(), x, out.argmax(1)

    net = twin(Mixed())
    with Chunked(net, size=8):
        flags = [each.requires_grad for each in net(X)]
        assert flags == [True, False, False, False]
        x = X.clone().requires_grad_()
        assert [each.requires_grad for each in net(x)] == [True, False, True, False]


def test_unused_outputs_and_outputs_changed_in_place() -> None:
    net = twin(Returning(lambda out: (out, out.exp(), out * 3)))

    def some(net: Any) -> Tensor:
        first, _, third = net(X)
        third.mul_(2)
        return nt_xent(first[:, :4], LABELS) + third[2:5].sum()

    _, wanted = gradient(net, some)
    with Chunked(net, size=4):
        assert off_by(gradient(net, some)[1], wanted) <= EXACT


class Scaled(Net):
    """It returns a value that all rows share, as models of image and text do."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.logit_scale.exp(), self.head.weight.T


@pytest.mark.parametrize("keep", [0, 1, 9])
def test_values_without_rows_get_their_gradient_once(keep: int) -> None:
    net = twin(Scaled())

    def contrast(net: Any) -> Tensor:
        out, scale, weight = net(X)
        return nt_xent(scale * out, LABELS) + scale.square() + weight.square().sum()

    _, wanted = gradient(net, contrast)
    with Chunked(net, size=4, keep=keep):
        for _ in range(3):
            assert off_by(gradient(net, contrast)[1], wanted) <= EXACT

    def each_chunk(net: Any) -> Tensor:
        parts = [net(c) for c in X.split(4)]
        out = torch.cat([part[0] for part in parts])
        scale, weight = (torch.stack([p[i] for p in parts]).sum(0) for i in (1, 2))
        return nt_xent(parts[0][1] * out, LABELS) + scale**2 + weight.square().sum()

    assert off_by(gradient(net, each_chunk)[1], wanted) > NAIVE


def test_channels_last_is_kept() -> None:
    conv: Any = nn.Conv2d(3, 4, 3).double()
    conv.to(memory_format=torch.channels_last)
    images = torch.randn(22, 3, 8, 8, dtype=torch.float64)
    images = images.contiguous(memory_format=torch.channels_last)
    plain = conv(images)
    with Chunked(conv, size=4):
        found = conv(images)
    assert found.stride() == plain.stride()
    assert off_by(found.detach(), plain.detach()) <= EXACT


@pytest.mark.parametrize("batch_first", [False, True])
def test_recurrent_layers(batch_first: bool) -> None:
    """Rows are found where they are; a layer that takes them second is refused."""
    net = nn.LSTM(6, CLASSES, num_layers=2, batch_first=batch_first).double()
    x = torch.randn(22, 3, 6, dtype=torch.float64)

    def step(net: Any) -> Tensor:
        out, (hidden, cell) = net(x)
        assert hidden.shape[1] == (22 if batch_first else 3)
        return nt_xent(out[:, -1] + (hidden[0] * cell[1] if batch_first else 0), LABELS)

    _, wanted = gradient(net, step)
    with Chunked(net, size=4):
        if batch_first:
            assert off_by(gradient(net, step)[1], wanted) <= EXACT
        else:
            with pytest.raises(TrainkitError, match="rows"):
                step(net)


# ---- refused -------------------------------------------------------------------------


class Seeing(Net):
    """Its rows see each other."""

    def __init__(self, way: str, *, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)
        self.way = way

    def forward(self, x: Tensor) -> Any:
        return SEEING[self.way](super().forward(x))


SEEING: dict[str, Any] = {
    "attention over rows": lambda out: (out @ out.T).softmax(-1) @ out,
    "BatchNorm by hand": lambda o: (o - o.mean(0)) / (o.var(0) + 1e-5).sqrt(),
    "running sum": lambda out: out.cumsum(0),
    "running sum from behind": lambda out: out.flip(0).cumsum(0).flip(0),
    "neighbour": lambda out: out + out.roll(1, 0),
    "function of BatchNorm": lambda o: F.batch_norm(o, None, None, training=True),
    "place in the batch": lambda out: out + torch.arange(len(out))[:, None],
    "number of rows": lambda out: out / len(out),
    "capacity of six rows": lambda o: o * (torch.arange(len(o)) < 6)[:, None],
    "sum of rows": lambda out: (out, out.sum(0)),
}
WAYS = list(SEEING)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
def test_rows_that_see_each_other_are_refused(
    way: str, dtype: torch.dtype, dropout: float
) -> None:
    net = Seeing(way, dropout=dropout).to(dtype)
    with Chunked(net, size=4):
        with pytest.raises(TrainkitError, match=r"Seeing.*(depends on|no rows)"):
            net(X.to(dtype))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_that_do_not_are_not_refused(dtype: torch.dtype, dropout: float) -> None:
    net = Net(dropout=dropout).to(dtype)
    with Chunked(net, size=8):
        for rows in (2, 3, 5, 22):
            net(X[:rows].to(dtype)).sum().backward()


@pytest.mark.parametrize("way", WAYS[:5])
def test_rows_that_see_each_other_would_be_wrong(way: str) -> None:
    net = twin(Seeing(way))
    _, wanted = gradient(net, lambda net: nt_xent(net(X), LABELS))

    def chunked(net: Any) -> Tensor:
        return nt_xent(torch.cat([net(c) for c in X.split(8)]), LABELS)

    assert off_by(gradient(net, chunked)[1], wanted) > NAIVE


def test_batch_norm_is_refused_in_training_and_exact_in_evaluation() -> None:
    net = nn.Sequential(Net(), nn.BatchNorm1d(CLASSES)).double()

    def step(net: Any) -> Tensor:
        return nt_xent(net(X), LABELS)

    net[1].eval()
    _, wanted = gradient(net, step)
    with Chunked(net, size=8):
        for _ in range(3):
            assert off_by(gradient(net, step)[1], wanted) <= EXACT
        net.train()  # after the first calls, too
        with pytest.raises(TrainkitError, match=r"BatchNorm normalises.*1"):
            step(net)


REFUSED: dict[str, tuple[Any, str]] = {
    "scalar": (lambda out: out.mean(), "depends on them"),
    "no rows": (lambda out: torch.zeros(3), "nothing that has rows"),
    "loss beside": (lambda out: (out, out.mean()), "'1'.*depends on them"),
    "some rows": (lambda out: out[out[:, 0] > out[:, 1].mean()], "rows"),
    "number": (lambda out: (out, out.sum().item()), "'1' is a float"),
    "length": (lambda out: (out, len(out)), "'1' is a int"),
    "distribution": (
        lambda out: torch.distributions.Categorical(logits=out),
        "is a Categorical",
    ),
    "set": (lambda out: (out, {out}), "is a set"),
    "packed": (lambda out: pack_sequence(list(out)), "rows"),
    "sparse": (lambda out: out.to_sparse(), "dense"),
    "pairs": (lambda out: out[:, None, 0] * out[None, :, 0], "does not follow"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_outputs_that_cannot_be_joined_are_refused(kind: str) -> None:
    make, named = REFUSED[kind]
    net = twin(Returning(make))
    with Chunked(net, size=8):
        with pytest.raises(TrainkitError, match=rf"(?s)Chunked\(Returning\).*{named}"):
            net(X)


@pytest.mark.parametrize(
    "make",
    [
        lambda out: (out, len(out) == 7),
        lambda out: (out, torch.tensor(len(out) == 7)),
        lambda out: out[:3] if len(out) == 7 else out,
        lambda out: (out, out) if len(out) == 7 else (out, out, out),
        lambda out: out.float() if len(out) == 7 else out,
    ],
)
def test_outputs_that_differ_in_later_chunks_are_refused(make: Any) -> None:
    net = twin(Returning(make))  # chunks of 8, 7 and 7 rows
    with Chunked(net, size=8), pytest.raises(TrainkitError, match="Returning"):
        net(X)
