"""What a module in chunks may return, and what it is refused for."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.utils.rnn import pack_sequence
from transformers.utils.generic import ModelOutput

from tests.core.inside.common import (
    CLASSES,
    EXACT,
    LABELS,
    NAIVE,
    Net,
    X,
    gradient,
    nt_xent,
    off,
    off_by,
    refused,
    twin,
)
from trainkit import Chunked, TrainkitError
from trainkit.core.inside.outputs import are_close

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


def returning(make: Any) -> Any:
    """A net that makes something of its output."""
    return twin(Net(lambda net, x: make(net.plain(x))))


KINDS: dict[str, tuple[Any, Any]] = {
    "tensor": (lambda out: out, lambda o: o),
    "tuple": (
        lambda out: (out.sum(1), out, None, 3, "text", True),
        lambda o: o[1] * o[0][:, None],
    ),
    "list": (lambda out: [out, {"a": out.exp()}], lambda o: o[0] + o[1]["a"]),
    "dict": (
        lambda out: {"hidden": out.tanh(), "out": out, "none": None, "n": 4},
        lambda o: o["out"] + o["hidden"],
    ),
    "namedtuple": (lambda out: Pair(out, 3), lambda o: o.out * o.size),
    "dataclass": (lambda out: Held(out, out.exp()), lambda o: o.out * o.hidden),
    "frozen output": (
        lambda out: (out, out.detach(), (out > 0), out.argmax(1)),
        lambda o: o[0] * o[1] + o[2] + o[3][:, None],
    ),
    "model output": (
        lambda out: Output(out=out, hidden=(out.exp(), out * 2)),
        lambda o: o.out + o.hidden[0] * o["hidden"][1],
    ),
    "twice": (lambda out: (out, out), lambda o: o[0] * o[1].exp()),
    "view": (
        lambda out: (out, out[:, :2], out.view(-1)),
        lambda o: o[0] * o[1].sum(1, keepdim=True) + o[2].view(-1, CLASSES),
    ),
    "second dimension": (
        lambda out: (out.T.contiguous(), out[None]),
        lambda o: o[0].T + o[1][0].exp(),
    ),
    "flattened": (
        lambda out: out.repeat_interleave(3, 0),
        lambda o: o.view(len(X), 3, -1).prod(1),
    ),
    "some not used, one changed in place": (
        lambda out: (out, out.exp(), out * 3),
        lambda o: o[0] + o[2].mul_(2).relu(),
    ),
}


@pytest.mark.parametrize(("kind", "size"), [*zip(KINDS, cycle([1, 8]))])
def test_outputs_of_any_structure(kind: str, size: int) -> None:
    make, use = KINDS[kind]
    types: set[type] = set()

    def used(net: Any) -> Tensor:
        output = net(X)
        types.add(type(output))
        return nt_xent(use(output), LABELS)

    assert off(returning(make), used, size=size) <= EXACT
    assert len(types) == 1


class OfCalls(nn.Module):
    """Returns the logits of all tokens one behind the other, and more if asked."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 2).double()

    def forward(self, x: Tensor, both: bool, attention_mask: Tensor) -> Any:
        out = self.net(x)
        flat = out.flatten(0, 1)
        return (flat, out.exp()) if both else flat


CALLS = [*[(w, False) for w in (5, 6, 7, 8, 9, 9, 5)], *[(4, True), (3, False)] * 3]


@pytest.mark.parametrize("limit", [{"size": 2}, {"tokens": 20}])
def test_calls_may_differ_in_width_and_in_flags(limit: dict[str, int]) -> None:
    """Not every call is looked at: what one has shown must serve the others."""
    module, whole = OfCalls(), OfCalls()
    with Chunked(module, **limit):  # type: ignore[arg-type]
        for width, both in CALLS:
            x = torch.randn(5, width, 3, dtype=torch.float64)
            for each in (module, whole):
                out = each(x, both, attention_mask=torch.ones(5, width))
                parts = out if isinstance(out, tuple) else (out,)
                torch.stack([part.norm() for part in parts]).sum().backward()
    for mine, wanted in zip(module.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(mine.grad, wanted.grad, rtol=1e-12)  # type: ignore[arg-type]


def test_detached_outputs_and_copies_of_arguments_have_no_gradient() -> None:
    def several(net: Any, x: Tensor) -> Any:
        out = net.plain(x)
        return out, out.detach(), x, out.argmax(1)

    net = twin(Net(several))
    with Chunked(net, size=8):
        for x in (X, X.clone().requires_grad_()):
            flags = [each.requires_grad for each in net(x)]
            assert flags == [True, False, x.requires_grad, False]
    with Chunked(twin(Net(lambda net, x: net.plain(x).argmax(1))), size=8) as net:
        assert not net(X).requires_grad


@pytest.mark.parametrize("without", [slice(4), slice(-4, None)])
def test_a_chunk_without_a_gradient(without: slice) -> None:
    """As of an expert to which none of its rows go. The last tells what has one."""

    def routed(net: Any, x: Tensor) -> Any:
        chosen = x[:, 0] > 0
        out = x.new_zeros(len(x), CLASSES)
        if chosen.any():
            out[chosen] = net.plain(x[chosen])
        return x @ net.weight, out

    net, x = twin(Net(routed, weight=nn.Parameter(torch.ones(6, CLASSES)))), X.clone()
    x[:, 0] = 1
    x[without, 0] = -1

    def used(net: Any) -> Tensor:
        return nt_xent(sum(net(x)), LABELS)  # type: ignore[arg-type]

    if without.stop:
        assert off(net, used) <= EXACT
        return
    with Chunked(net, size=4), pytest.raises(TrainkitError, match="in some chunks"):
        used(net).backward()


def test_values_without_rows_get_their_gradient_once() -> None:
    """As the scale that models of image and text return, or a parameter itself."""

    def scaled(net: Any, x: Tensor) -> Any:
        return net.plain(x), net.scale.exp(), net.head.weight.T, net.head.weight

    def used(parts: Any, whole: Any) -> Tensor:
        out, scale, weight, itself = whole
        more = scale.square() + weight.square().sum() + itself.square().sum()
        return nt_xent(parts[0][1] * out, LABELS) + more

    def contrast(net: Any) -> Tensor:
        whole = net(X)
        return used([whole], whole)

    def each_chunk(net: Any) -> Tensor:
        parts = [net(c) for c in X.split(4)]
        sums = [torch.stack([p[i] for p in parts]).sum(0) for i in (1, 2, 3)]
        return used(parts, (torch.cat([part[0] for part in parts]), *sums))

    net = twin(Net(scaled, scale=nn.Parameter(torch.zeros(()))))
    _, wanted = gradient(net, contrast)
    assert off(net, contrast, size=4) <= EXACT
    assert off_by(gradient(net, each_chunk)[1], wanted) > NAIVE  # the control


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


def test_recurrent_layers() -> None:
    """Their states have rows in the second dimension."""
    net = nn.LSTM(6, CLASSES, num_layers=2, batch_first=True).double()
    x = torch.randn(22, 3, 6, dtype=torch.float64)

    def used(net: Any) -> Tensor:
        out, (hidden, cell) = net(x)
        assert hidden.shape[1] == 22
        return nt_xent(out[:, -1] + hidden[0] * cell[1], LABELS)

    assert off(net, used) <= EXACT
    net.batch_first = False
    refused(net, "Rows must be dimension 0 .* as with batch_first=True", x)


# ---- rows that see each other --------------------------------------------------------

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


@pytest.mark.parametrize(
    ("dtype", "dropout"), [(torch.float64, 0.0), (torch.bfloat16, 0.5)]
)
@pytest.mark.parametrize("way", SEEING)
def test_rows_that_see_others_are_refused(way: str, dtype: Any, dropout: float) -> None:
    net = Net(lambda net, x: SEEING[way](net.plain(x)), dropout=dropout).to(dtype)
    refused(net, "(depends on|no rows)")
    if dtype is torch.float64 and not dropout and way != "sum of rows":
        _, wanted = gradient(net, lambda net: net(X).square().std())
        _, chunked = gradient(
            net, lambda net: torch.cat([net(c) for c in X.split(8)]).square().std()
        )
        assert off_by(chunked, wanted) > NAIVE


def test_rows_that_do_not_see_each_other_are_not_refused() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        plain = Net(dropout=0.5).to(dtype)
        with Chunked(plain, size=8):
            for rows in (2, 3, 5, 22):
                plain(X[:rows].to(dtype)).sum().backward()


def test_links_between_rows_of_any_two_chunks_are_found() -> None:
    def trimmed(net: Any, x: Tensor, lengths: Tensor) -> Tensor:
        """Leaves out what is padding in all rows, and takes the mean of the rest."""
        return net.plain(x[:, : lengths.max()]).mean(1)

    lengths = torch.full((16,), 5)
    lengths[8:12] = 3  # all rows of the third chunk
    x = torch.randn(16, 5, 6, dtype=torch.float64)
    refused(twin(Net(trimmed)), "depends on other rows", x, lengths)


@pytest.mark.parametrize("mask", [-1e9, -torch.inf, torch.finfo(torch.float32).min])
def test_a_mask_does_not_say_what_rounding_is(mask: float) -> None:
    one = torch.randn(8, 5)
    one[:, 3] = mask
    other = one.clone()
    assert are_close(one, other * (1 + 1e-7))
    other[2, 1] += 1e-3
    assert not are_close(one, other)
    large = 1e8 * torch.randn(8, 5)  # all are, so that they are no mask
    assert are_close(large, large + 10)
    assert not are_close(large, large * 1.001)
    for of_other_kind in (large[:, :1].expand(-1, 4), large.double()):
        assert not are_close(large, of_other_kind)


# ---- refused -------------------------------------------------------------------------

REFUSED: dict[str, tuple[Any, str]] = {
    "scalar": (lambda out: out.mean(), "depends on them"),
    "no rows": (lambda out: torch.zeros(3), "nothing that has rows"),
    "loss beside": (
        lambda out: (out, out.mean()),
        r"'1', of shape \[\], .*depends on them.* Compute that outside of it",
    ),
    "some rows": (lambda out: out[out[:, 0] > out[:, 1].mean()], "rows"),
    "number": (lambda out: (out, out.sum().item()), "'1' is a float"),
    "length": (lambda out: (out, len(out)), "'1' is a int"),
    "distribution": (lambda out: Categorical(logits=out), "is a Categorical"),
    "set": (lambda out: (out, {out}), "is a set"),
    "packed": (lambda out: pack_sequence(list(out)), "rows"),
    "sparse": (lambda out: out.to_sparse(), "dense"),
    "pairs": (lambda out: out[:, None, 0] * out[None, :, 0], "does not follow"),
    "list of rows": (list, "of rows: the number of its outputs depends on the rows"),
    "other dimensions": (
        lambda out: out if len(out) == 8 else out[None],
        "the shape of its output depends on the rows",
    ),
    # Chunks of 8, 7 and 7 rows: the last ones differ.
    "another flag": (lambda out: (out, len(out) == 7), "'1'"),
    "another value": (lambda out: (out, torch.tensor(len(out) == 7)), "'1'"),
    "other values": (
        lambda out: (out, torch.full((2,), len(out) == 7)),
        r"was another tensor of shape \[2\] for one and another",
    ),
    "fewer rows": (lambda out: out[:3] if len(out) == 7 else out, "rows"),
    "fewer outputs": (
        lambda out: (out, out) if len(out) == 7 else (out, out, out),
        "number of its outputs",
    ),
    "another dtype": (lambda out: out.float() if len(out) == 7 else out, "dtype"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_outputs_that_cannot_be_joined_are_refused(kind: str) -> None:
    make, words = REFUSED[kind]
    refused(returning(make), words, size=8)


def test_a_number_of_all_rows_is_refused_in_any_call() -> None:
    def warming(net: Any, x: Tensor) -> Any:
        out = net.plain(x)
        return out, net.weight * out.square().mean()

    def warmed(net: Any) -> Tensor:
        out, more = net(X)
        return nt_xent(out, LABELS) + more

    net = twin(Net(warming))
    net.weight = torch.zeros(())
    with Chunked(net, size=4):
        for _ in range(6):
            gradient(net, warmed)
        net.weight = torch.ones(())
        with pytest.raises(TrainkitError, match=r"'1' has no rows, and must be the"):
            gradient(net, warmed)
