"""How a module in chunks is called: exact, or left as it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


def step(net: Any) -> Tensor:
    return nt_xent(net(X), LABELS)


class Named(Net):
    """It takes its argument by name, and others that have no rows."""

    seen: tuple[int, ...] = ()

    def forward(
        self,
        x: Tensor | None = None,
        *,
        extra: Tensor | None = None,
        table: Tensor | None = None,
        scale: float = 1.0,
        mask: Tensor | None = None,
    ) -> Tensor:
        assert x is not None
        self.seen = (*self.seen, len(x))
        out = super().forward(x) * scale
        if extra is not None:
            out = out + extra
        if mask is not None:
            out = out + out @ mask[:CLASSES, :CLASSES].to(out)
        return out if table is None else out @ table.T


def exact(net: Any, size: int, shared: list[str], **arguments: Any) -> None:
    """A call has the whole batch's gradient, for its arguments too."""
    leaves = [v for v in arguments.values() if isinstance(v, Tensor) and v.is_leaf]

    def gradients() -> list[Tensor]:
        for each in [*leaves, *net.parameters()]:
            each.grad = None
        nt_xent(net(X, **arguments), LABELS).backward()
        every = [*net.parameters(), *leaves]
        return [each.grad for each in every if each.grad is not None]

    wanted = gradients()
    with Chunked(net, size=size, shared=shared):
        net.seen = ()
        found = gradients()
        assert len(net.seen) > 2
        assert max(net.seen) <= max(2 * size, 4)  # so many are compared at first
    for one, other in zip(found, wanted, strict=True):
        assert off_by(one, other) <= EXACT


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize(
    "arguments",
    [
        {"extra": leaf(1, CLASSES)},
        {"extra": leaf(CLASSES)},
        {"extra": leaf(22, CLASSES)},
        {"extra": leaf(22, 1)},
        {"extra": leaf()},
        {"table": leaf(22, CLASSES)},
        {"table": leaf(44, CLASSES)},
        {"table": leaf(7, CLASSES), "extra": leaf(22, CLASSES)},
        {"mask": torch.ones(22, 22).tril()},
        {"scale": 2.0},
    ],
    ids=lambda a: ",".join(f"{k}{list(getattr(v, 'shape', ()))}" for k, v in a.items()),
)
def test_arguments_with_and_without_rows(arguments: Any, size: int) -> None:
    """A table or a mask as long as the batch has rows must be named."""
    named = [name for name in ("table", "mask") if name in arguments]
    exact(twin(Named()), size, named, **arguments)
    for name in named:
        if len(arguments[name]) == len(X):
            with pytest.raises(TrainkitError, match=f"22 of x, {name}, .* in shared="):
                exact(twin(Named()), size, [], **arguments)


def test_a_table_cut_by_its_length_would_be_wrong() -> None:
    net, table = twin(Named()), leaf(22, CLASSES)
    _, wanted = gradient(net, lambda net: nt_xent(net(X, table=table), LABELS))

    def naive(net: Any) -> Tensor:
        pairs = zip(X.split(11), table.split(11), strict=True)
        return nt_xent(torch.cat([net(x, table=t) for x, t in pairs]), LABELS)

    assert off_by(gradient(net, naive)[1], wanted) > NAIVE


class Picking(nn.Module):
    """It looks rows up in a table, which comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, table: Tensor, index: Tensor) -> Tensor:
        return self.net(table[index])


@pytest.mark.parametrize("entries", [22, 30])
@pytest.mark.parametrize("highest", [2, 22])
def test_a_table_that_is_looked_up_is_given_whole(entries: int, highest: int) -> None:
    torch.manual_seed(2)
    net, table = twin(Picking()), leaf(entries, 6)
    index = torch.randint(0, highest, (22,))
    index[1], index[-2] = 0, highest - 1

    def looked_up(net: Any) -> Tensor:
        table.grad = None
        return nt_xent(net(table, index), LABELS)

    _, wanted = gradient(net, looked_up)
    of_table = table.grad
    with Chunked(net, size=4, shared=["table"]):
        assert off_by(gradient(net, looked_up)[1], wanted) <= EXACT
        assert off_by(table.grad, of_table) <= EXACT  # type: ignore[arg-type]
    with Chunked(net, size=4), pytest.raises(TrainkitError, match="shared="):
        gradient(net, looked_up)


def test_one_tensor_twice_and_nested_arguments() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, pair: dict[str, list[Tensor]], other: Any) -> Tensor:
            first, second = pair["both"]
            return self.net(first * second.exp()) + other[0][:, :CLASSES]

    net, x = twin(Nested()), X.clone().requires_grad_()

    def nested(net: Any) -> Tensor:
        x.grad = None
        return nt_xent(net({"both": [x, x], "none": None}, (x, "text", 3)), LABELS)

    _, wanted = gradient(net, nested)
    of_x = x.grad
    with Chunked(net, size=4):
        assert off_by(gradient(net, nested)[1], wanted) <= EXACT
        assert off_by(x.grad, of_x) <= EXACT  # type: ignore[arg-type]


def test_no_rows_one_row_and_few_rows_run_as_they_are() -> None:
    net = twin(Named())
    with Chunked(net, size=8):
        for rows in (0, 1, 8):
            net.seen = ()
            net(X[:rows]).sum().backward()
            assert net.seen == (rows,)


def test_a_last_batch_of_one_row_beside_a_table() -> None:
    net, table = twin(Named()), leaf(7, CLASSES)
    with Chunked(net, size=8):
        net(X, table=table).sum().backward()
        wanted = net(X, table=table)[:1].detach()
        assert off_by(net(X[:1], table=table).detach(), wanted) <= EXACT


def test_without_gradients_and_in_evaluation() -> None:
    net = twin(Named())
    wanted = net(X)
    with Chunked(net, size=8):
        for mode in (torch.no_grad, torch.inference_mode):
            for is_training in (True, False):
                net.train(is_training)
                net.seen = ()
                with mode():
                    assert off_by(net(X.clone()), wanted) <= EXACT
                # A teacher in training mode runs in chunks, an evaluation as it is. So
                # many rows as two chunks have are compared at first.
                assert max(net.seen) == 22 if not is_training else max(net.seen) <= 16
        net.seen = ()
        assert off_by(net.eval()(X), wanted) <= EXACT  # it may train so
        assert max(net.seen) == 11  # groups of rows that are looked at


def test_calls_with_other_numbers_of_rows_in_one_step() -> None:
    def retrieval(net: Any) -> Tensor:
        queries, passages = net(X[:6]), net(torch.cat([X, X.flip(1)])[:36])
        return F.cross_entropy(queries @ passages.T, torch.arange(6) * 6)

    net = twin(Net())
    _, wanted = gradient(net, retrieval)
    with Chunked(net, size=4):
        for _ in range(3):
            assert off_by(gradient(net, retrieval)[1], wanted) <= EXACT


def test_only_some_rows_used_and_two_modules_at_once() -> None:
    both = twin(nn.ModuleList([Net(), Net(seed=1)]))

    def clip(both: Any) -> Tensor:
        one, two = both[0](X)[3:9], both[1](X.flip(1))[3:9]
        return F.cross_entropy(one @ two.T, torch.arange(6))

    _, wanted = gradient(both, clip)
    with Chunked(both[0], size=4), Chunked(both[1], size=5):
        assert off_by(gradient(both, clip)[1], wanted) <= EXACT


@pytest.mark.parametrize("keep", [0, 1, 9])
def test_a_module_in_chunks_within_another(keep: int) -> None:
    net = twin(Net(dropout=0.0))
    _, wanted = gradient(net, step)
    with Chunked(net, size=6, keep=keep), Chunked(net.body, size=2, keep=keep):
        for _ in range(3):
            assert off_by(gradient(net, step)[1], wanted) <= EXACT


def test_tied_partly_frozen_and_shared_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 6)
            self.net = Net()
            self.head = nn.Linear(6, 9, bias=False)
            self.head.weight = self.embed.weight
            self.net.body[0].requires_grad_(False)

        def forward(self, ids: Tensor) -> Tensor:
            out = self.net(self.embed(ids)) @ self.net.head.weight[:, :6]
            return self.head(out)

    net, ids = twin(Tied()), torch.randint(0, 9, (22,))

    def tied(net: Any) -> Tensor:
        scale = net.embed.weight.square().mean() + net.net.head.weight.mean()
        return nt_xent(net(ids), LABELS) + scale

    _, wanted = gradient(net, tied)
    for cut in (net, net.net, net.embed):
        with Chunked(cut, size=4):
            assert off_by(gradient(net, tied)[1], wanted) <= EXACT


@pytest.mark.parametrize("keep", [0, 9])
def test_sparse_embeddings(keep: int) -> None:
    net = nn.EmbeddingBag(9, 5, sparse=True, mode="sum").double()
    ids = torch.randint(0, 9, (22, 3))

    def bags(net: Any) -> Tensor:
        return nt_xent(net(ids), LABELS)

    bags(net).backward()
    wanted = net.weight.grad.to_dense()  # type: ignore[union-attr]
    net.zero_grad()
    with Chunked(net, size=4, keep=keep):
        bags(net).backward()
    assert net.weight.grad is not None
    assert net.weight.grad.is_sparse
    assert off_by(net.weight.grad.to_dense(), wanted) <= EXACT


# ---- refused -------------------------------------------------------------------------


class Listed(Net):
    """It takes one value for each row, in a list or an array."""

    def forward(self, x: Tensor, numbers: Any) -> Tensor:  # pyright: ignore
        found = [float(n) for n, _ in zip(numbers, x, strict=False)]
        return super().forward(x) * torch.tensor(found, dtype=x.dtype)[:, None]


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_lists_with_one_value_for_each_row_are_cut(kind: Any) -> None:
    net, numbers = twin(Listed()), kind(list(range(22)))

    def listed(net: Any) -> Tensor:
        return nt_xent(net(X, numbers), LABELS)

    _, wanted = gradient(net, listed)
    with Chunked(net, size=4):
        for _ in range(3):
            assert off_by(gradient(net, listed)[1], wanted) <= EXACT
    with Chunked(net, size=4, shared=["numbers"]):  # each chunk takes the first ones
        with pytest.raises(TrainkitError, match="place among them"):
            gradient(net, listed)


def test_a_pair_of_numbers_is_no_list_of_two_rows() -> None:
    class Sized(Net):
        def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:  # type: ignore[override]
            return super().forward(x) * (size[0] - size[1])

    net = twin(Sized())
    with Chunked(net, size=1):
        net(X, (3, 5))
    with Chunked(net, size=1), pytest.raises(TrainkitError, match="shared="):
        net(X[:2], (3, 5))
    with Chunked(net, size=1, shared=["size"]):
        net(X[:2], (3, 5))


class Detector(nn.Module):
    """It takes a list of images of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, images: list[Tensor]) -> Tensor:
        return torch.stack([self.conv(each[None])[0].mean((1, 2)) for each in images])


def test_kinds_of_rows_that_cannot_be_cut_are_refused() -> None:
    net = Detector()
    with Chunked(net, size=2), pytest.raises(TrainkitError, match="does not run on"):
        net([torch.randn(3, 8 + i, 8) for i in range(4)])
    packed = nn.utils.rnn.pack_sequence([torch.randn(n, 6) for n in (4, 3, 1)])
    with Chunked(nn.LSTM(6, 5), size=2) as lstm, pytest.raises(TrainkitError):
        lstm(packed)
    nested = torch.nested.nested_tensor(list(torch.randn(3, 2, 6)), layout=torch.jagged)
    for kind in (nested, torch.randn(22, 6).to_sparse()):
        with Chunked(nn.Linear(6, 5), size=2) as linear:
            with pytest.raises(TrainkitError, match="input is a .* tensor"):
                linear(kind)
    with pytest.raises(TrainkitError, match="lazy ones get theirs"):
        Chunked(nn.LazyLinear(5), size=2)
    with pytest.raises(TrainkitError, match=r"'tables'.*x, extra, table"):
        Chunked(Named(), size=2, shared=["tables"])
    embedding = nn.Embedding(9, 5, max_norm=0.5)
    with Chunked(embedding, size=2), pytest.raises(TrainkitError, match="moved weight"):
        embedding(torch.arange(9))
