"""What a module in chunks is given, and how it is called: exact, or left whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

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
    step,
    twin,
)
from trainkit import Chunked, TrainkitError
from trainkit.core.nested import take_apart


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


class Named(Net):
    """Some of its arguments have rows, and others have none."""

    seen: Any

    def forward(
        self,
        x: Tensor,
        *,
        extra: Any = None,
        table: Any = None,
        scale: float = 1.0,
        mask: Any = None,
    ) -> Tensor:
        self.seen.append(len(x))
        out = self.plain(x) * scale
        if extra is not None:
            out = out + extra
        if mask is not None:
            out = out + out @ mask[:CLASSES, :CLASSES].to(out)
        return out if table is None else out @ table.T


def named() -> Any:
    return twin(Named(seen=[]))


ARGUMENTS: list[tuple[dict[str, Any], bool]] = [
    ({"extra": leaf(1, CLASSES)}, False),
    ({"extra": leaf()}, False),
    ({"table": leaf(22, CLASSES)}, True),
    ({"table": leaf(44, CLASSES)}, False),
    ({"table": leaf(7, CLASSES), "extra": leaf(22, 1)}, False),
    ({"mask": torch.ones(22, 22).tril()}, True),
    ({"scale": 2.0}, False),
]
"""Arguments, and whether one without rows is as long as the batch: it must be named."""


@pytest.mark.parametrize(("arguments", "must_name"), ARGUMENTS)
def test_arguments_with_and_without_rows(arguments: Any, must_name: bool) -> None:
    net, shared = named(), [each for each in ("table", "mask") if each in arguments]
    leaves = [v for v in arguments.values() if getattr(v, "requires_grad", False)]

    def gradients() -> list[Tensor]:
        loss = nt_xent(net(X, **arguments), LABELS)
        return list(torch.autograd.grad(loss, [*net.parameters(), *leaves]))

    wanted = gradients()
    with Chunked(net, size=4, shared=shared):
        net.seen.clear()
        for one, other in zip(gradients(), wanted, strict=True):
            assert off_by(one, other) <= EXACT
        assert len(net.seen) > 2
        assert max(net.seen) <= 8  # so many are compared at first
    if must_name:
        refused(net, f"22 of x, {shared[0]}, .* in shared=", X, **arguments)


def test_a_table_cut_by_its_length_would_be_wrong() -> None:
    net, table = named(), leaf(22, CLASSES)
    _, wanted = gradient(net, lambda net: nt_xent(net(X, table=table), LABELS))

    def naive(net: Any) -> Tensor:
        pairs = zip(X.split(11), table.split(11), strict=True)
        return nt_xent(torch.cat([net(x, table=t) for x, t in pairs]), LABELS)

    assert off_by(gradient(net, naive)[1], wanted) > NAIVE


@pytest.mark.parametrize(("entries", "highest"), [(22, 22), (30, 2)])
def test_a_table_that_is_looked_up_is_given_whole(entries: int, highest: int) -> None:
    """It comes first, so that without shared= it tells the number of rows."""

    class Picking(Net):
        def forward(self, table: Tensor, index: Tensor) -> Tensor:
            return self.plain(table[index])

    net, table = twin(Picking()), leaf(entries, 6)
    index = torch.randint(0, highest, (22,))
    index[1], index[-2] = 0, highest - 1

    def looked_up(net: Any) -> Tensor:
        table.grad = None
        return nt_xent(net(table, index), LABELS)

    gradient(net, looked_up)
    of_table: Any = table.grad
    assert off(net, looked_up, size=4, shared=["table"]) <= EXACT
    assert off_by(table.grad, of_table) <= EXACT  # type: ignore[arg-type]
    refused(net, "shared=", table, index)


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_lists_with_one_value_for_each_row_are_cut(kind: Any) -> None:
    class Listed(Net):
        def forward(self, x: Tensor, numbers: Any) -> Tensor:
            found = [float(n) for n, _ in zip(numbers, x, strict=False)]
            return self.plain(x) * torch.tensor(found, dtype=x.dtype)[:, None]

    net, numbers = twin(Listed()), kind(list(range(22)))
    assert off(net, lambda net: nt_xent(net(X, numbers), LABELS)) <= EXACT
    # Each chunk would take the first ones.
    with Chunked(net, size=4, shared=["numbers"]):
        with pytest.raises(TrainkitError, match="place among them"):
            net(X, numbers)


def test_a_pair_of_numbers_beside_two_rows_must_be_named() -> None:
    class Sized(Net):
        def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
            return self.plain(x) * (size[0] - size[1])

    net = twin(Sized())
    refused(net, "shared=", X[:2], (3, 5), size=1)
    with Chunked(net, size=1, shared=["size"]):
        net(X[:2], (3, 5))
    with Chunked(net, size=1):
        net(X, (3, 5))


def test_the_first_argument_need_not_have_rows() -> None:
    class Scaled(Net):
        def forward(self, scale: Any, x: Any = None) -> Tensor:
            return self.head.weight if x is None else self.plain(x) * scale

    for scale in (None, 2.0, leaf()):
        given = 1.0 if scale is None else scale
        assert off(twin(Scaled()), lambda n, g=given: nt_xent(n(g, X), LABELS)) <= EXACT
    net = twin(Scaled())
    with Chunked(net, size=4):  # nothing that could be cut
        assert torch.equal(net(1.0), net.head.weight)


def test_an_argument_whose_gradient_is_stopped_gets_none() -> None:
    net, to = twin(Net(lambda net, x, to: net.plain(x) + to.detach())), leaf(22, 1)
    assert off(net, lambda net: nt_xent(net(X, to), LABELS)) <= EXACT
    assert to.grad is None


def test_a_forward_without_a_signature_and_an_argument_that_is_given_twice() -> None:
    bend: Any = nn.Module()
    bend.forward = torch.tanh
    with Chunked(bend, size=4):
        assert torch.equal(bend(X), X.tanh())
    with Chunked(nn.Linear(6, 5).double(), size=4) as linear:
        with pytest.raises(TrainkitError, match="multiple values for argument 'input'"):
            linear(X, input=X)


# ---- any structure -------------------------------------------------------------------

LEAVES = st.sampled_from(
    ["rows", "row", "two each", "integers", "one", "table", None, 3, 0.5, "x"]
)
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    ),
    max_leaves=6,
)
OUTPUTS: dict[Any, Any] = {
    "rows": lambda out: out.exp(),
    "row": lambda out: out[:, 0],
    "two each": lambda out: out.repeat_interleave(2, 0),
    "integers": lambda out: out.argmax(1),
    "one": lambda out: out.T,
    "table": lambda out: out.detach(),
}
INPUTS: dict[Any, Any] = {
    "rows": lambda rows: leaf(rows, 3),
    "row": lambda rows: leaf(rows, 3),
    "two each": lambda rows: leaf(1, 3),
    "integers": lambda rows: torch.randint(0, 5, (rows, 3)),
    "one": lambda rows: leaf(1, 3),
    "table": lambda rows: leaf(17, 4),
}


class Folding(nn.Module):
    """It folds all arguments into each row, and returns a structure of rows."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.net, self.make = nn.Linear(3, 3).double(), make

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = self.net(x).tanh()
        for _, value in take_apart((args, kwargs))[0]:
            if isinstance(value, int | float):
                out = out * (1 + value)
            elif isinstance(value, Tensor):
                is_table = value.shape[1] == 4
                value = value.sum(0)[:3] if is_table else value.double()
                out = out * (1 + value.sigmoid())
        fields, build = take_apart(self.make)
        return out, build(OUTPUTS.get(v, lambda _, v=v: v)(out) for _, v in fields)


def total(output: Any) -> Tensor:
    """A loss in which all rows see each other."""
    parts = [f.value for f in take_apart(output)[0] if isinstance(f.value, Tensor)]
    return torch.stack([p.double().square().mean().sqrt() for p in parts]).prod()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    args=st.lists(NESTED, max_size=2),
    kwargs=st.dictionaries(st.sampled_from(["k", "l"]), NESTED, max_size=2),
    make=NESTED,
    rows=st.integers(4, 9),  # more than a list has plain values
    size=st.integers(1, 9),
)
def test_any_structure(
    args: list[Any], kwargs: dict[str, Any], make: Any, rows: int, size: int
) -> None:
    torch.manual_seed(rows)
    net, x = Folding(make), torch.randn(rows, 3, dtype=torch.float64)
    fields, build = take_apart((args, kwargs))
    args, kwargs = build(INPUTS.get(v, lambda _, v=v: v)(rows) for _, v in fields)
    values = [each.value for each in take_apart((args, kwargs))[0]]
    leaves = [v for v in values if isinstance(v, Tensor) and v.requires_grad]
    leaves += net.parameters()

    def gradients() -> tuple[Any, list[Tensor]]:
        output = net(x, *args, **kwargs)
        found = torch.autograd.grad(total(output), leaves, materialize_grads=True)
        return output, list(found)

    wanted_output, wanted = gradients()
    with Chunked(net, size=size):
        for _ in range(2):
            output, found = gradients()
            one, other = (take_apart(each)[0] for each in (output, wanted_output))
            assert [f.path for f in one] == [f.path for f in other]
            for (_, a), (_, b) in zip(one, other, strict=True):
                if isinstance(b, Tensor):
                    assert a.shape == b.shape
                    assert a.requires_grad == b.requires_grad
                else:
                    assert a == b
            for a, b in zip(found, wanted, strict=True):
                assert off_by(a, b) <= EXACT or (a - b).norm() <= EXACT


# ---- calls ---------------------------------------------------------------------------


def test_no_rows_one_row_and_few_rows_run_as_they_are() -> None:
    net, table = named(), leaf(7, CLASSES)
    with Chunked(net, size=8):
        for rows in (0, 1, 8):
            net.seen.clear()
            net(X[:rows]).sum().backward()
            assert net.seen == [rows]
        net(X, table=table).sum().backward()
        wanted = net(X, table=table)[:1].detach()
        assert off_by(net(X[:1], table=table).detach(), wanted) <= EXACT


def test_without_gradients_and_in_evaluation() -> None:
    net = named()
    wanted = net(X)
    with Chunked(net, size=8):
        for mode in (torch.no_grad, torch.inference_mode):
            for is_training in (True, False):
                net.train(is_training)
                net.seen.clear()
                with mode():
                    assert off_by(net(X.clone()), wanted) <= EXACT
                # A teacher in training mode runs in chunks, an evaluation as it is. So
                # many rows as two chunks have are compared at first.
                assert max(net.seen) == 22 if not is_training else max(net.seen) <= 16
        net.seen.clear()
        assert off_by(net.eval()(X), wanted) <= EXACT  # it may train so
        assert max(net.seen) == 11  # groups of rows that are looked at


def retrieval(net: Any) -> Tensor:
    """Two calls with other numbers of rows."""
    queries, passages = net(X[:6]), net(torch.cat([X, X.flip(1)])[:36])
    return F.cross_entropy(queries @ passages.T, torch.arange(6) * 6)


def test_only_some_rows_used_and_two_modules_at_once() -> None:
    both = twin(nn.ModuleList([Net(), Net(seed=1)]))

    def clip(both: Any) -> Tensor:
        one, two = both[0](X)[3:9], both[1](X.flip(1))[3:9]
        return F.cross_entropy(one @ two.T, torch.arange(6))

    _, wanted = gradient(both, clip)
    with Chunked(both[1], size=5):
        assert off(both, clip, of=both[0], wanted=wanted) <= EXACT
    assert off(twin(Net()), retrieval) <= EXACT


def test_a_module_in_chunks_within_another() -> None:
    net = twin(Net())
    _, wanted = gradient(net, step)
    with Chunked(net.body, size=2):
        assert off(net, wanted=wanted, size=6) <= EXACT
    net.body.append(nn.Softmax(0))
    with Chunked(net.body, size=2), Chunked(net, size=6):
        with pytest.raises(TrainkitError, match=r"^Chunked\(Sequential\): it ca"):
            net(X)


def test_tied_partly_frozen_and_shared_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.net = nn.Embedding(9, 6), Net()
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

    for cut in (net, net.net, net.embed):
        assert off(net, tied, of=cut) <= EXACT


def test_sparse_embeddings() -> None:
    net: Any = nn.EmbeddingBag(9, 5, sparse=True, mode="sum").double()
    ids = torch.randint(0, 9, (22, 3))
    nt_xent(net(ids), LABELS).backward()
    wanted = net.weight.grad.to_dense()
    net.zero_grad()
    with Chunked(net, size=4):
        nt_xent(net(ids), LABELS).backward()
    assert net.weight.grad.is_sparse
    assert off_by(net.weight.grad.to_dense(), wanted) <= EXACT
