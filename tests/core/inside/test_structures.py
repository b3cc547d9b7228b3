"""Arguments and outputs of any nesting, in chunks of any size."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.core.inside.common import EXACT, off_by
from trainkit import Chunked
from trainkit.core.nested import take_apart

LEAVES = st.sampled_from(
    ["rows", "row", "two each", "rows of integers", "one", "table", None, 3, 0.5, "x"]
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


class Mixing(nn.Module):
    """It folds all arguments into each row, and returns a structure of rows."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.net = nn.Linear(3, 3).double()
        self.make = make

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = self.net(x).tanh()
        for field in take_apart((args, kwargs))[0]:
            value = field.value
            if isinstance(value, int | float):
                out = out * (1 + value)
            if isinstance(value, Tensor):
                out = out * (1 + folded(value, len(x)))
        _, build = take_apart(self.make)
        leaves = (leaf(each.value, out) for each in take_apart(self.make)[0])
        return out, build(leaves)


def folded(value: Tensor, rows: int) -> Tensor:
    if value.ndim == 2 and value.shape[1] == 4:  # a table
        return value.sum(0)[:3].sigmoid()
    return value.to(torch.float64).sigmoid()


def leaf(kind: Any, out: Tensor) -> Any:
    match kind:
        case "rows":
            return out.exp()
        case "row":
            return out[:, 0]
        case "two each":
            return out.repeat_interleave(2, 0)
        case "rows of integers":
            return out.argmax(1)
        case "one":
            return out.T
        case "table":
            return out.detach()
        case _:
            return kind


def argument(kind: Any, rows: int) -> Any:
    match kind:
        case "rows" | "row":
            return torch.randn(rows, 3, dtype=torch.float64).requires_grad_()
        case "rows of integers":
            return torch.randint(0, 5, (rows, 3))
        case "one" | "two each":
            return torch.randn(1, 3, dtype=torch.float64).requires_grad_()
        case "table":
            return torch.randn(17, 4, dtype=torch.float64).requires_grad_()
        case _:
            return kind


def total(output: Any) -> Tensor:
    """A loss in which all rows see each other."""
    parts = [f.value for f in take_apart(output)[0] if isinstance(f.value, Tensor)]
    return torch.stack([p.double().square().mean().sqrt() for p in parts]).prod()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    args=st.lists(NESTED, max_size=2),
    kwargs=st.dictionaries(st.sampled_from(["k", "l"]), NESTED, max_size=2),
    make=NESTED,
    rows=st.integers(4, 9),  # more than a list has plain values
    size=st.integers(1, 9),
    keep=st.sampled_from([0, 1, 9]),
)
def test_any_structure(
    args: list[Any], kwargs: dict[str, Any], make: Any, rows: int, size: int, keep: Any
) -> None:
    torch.manual_seed(rows)
    net = Mixing(make)
    x = torch.randn(rows, 3, dtype=torch.float64)
    fields, build = take_apart((args, kwargs))
    args, kwargs = build(argument(each.value, rows) for each in fields)
    values = [each.value for each in take_apart((args, kwargs))[0]]
    leaves = [v for v in values if isinstance(v, Tensor) and v.requires_grad]
    leaves += net.parameters()

    def gradients() -> tuple[Any, list[Tensor]]:
        output = net(x, *args, **kwargs)
        found = torch.autograd.grad(total(output), leaves, materialize_grads=True)
        return output, list(found)

    wanted_output, wanted = gradients()
    with Chunked(net, size=size, keep=keep):
        for _ in range(2):
            output, found = gradients()
            one, other = (take_apart(each)[0] for each in (output, wanted_output))
            assert [f.path for f in one] == [f.path for f in other]
            for a, b in zip(one, other, strict=True):
                if isinstance(b.value, Tensor):
                    assert a.value.shape == b.value.shape
                    assert a.value.requires_grad == b.value.requires_grad
                else:
                    assert a.value == b.value
            for a, b in zip(found, wanted, strict=True):
                assert off_by(a, b) <= EXACT or (a - b).norm() <= EXACT
