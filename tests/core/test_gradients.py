"""What is done to gradients, whatever kind they are of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.core.common import GivenWeight
from trainkit import Accumulator, TrainkitError
from trainkit.core.gradients import parameters_of, scale_, total_norm


def test_parameters_of_an_optimizer_equal_those_of_its_groups() -> None:
    a, b, c = (nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = torch.optim.SGD([{"params": [a, b]}, {"params": [c], "lr": 1}], lr=0.1)
    for given in (optimizer, [a, b, a, c], iter([a, b, c])):
        assert [id(p) for p in parameters_of(given)] == [id(a), id(b), id(c)]
    assert parameters_of(a)[0] is a


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (nn.Linear(2, 2), "an optimizer or its parameters, received Linear"),
        (3, "received int"),
        (nn.Linear(2, 2).named_parameters(), "received tuple"),
        ([], "received no parameters"),
        (iter(()), "received no parameters.*used up"),
    ],
)
def test_what_holds_no_parameters_is_refused(given: Any, text: str) -> None:
    """Nothing would be divided, and nobody would know."""
    with pytest.raises(TrainkitError, match=text):
        parameters_of(given)


class Kinds(nn.Module):
    """Parameters of every kind, not all of which each micro-batch uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        double: dict[str, Any] = {"dtype": torch.float64}
        self.tied = nn.Parameter(torch.ones(2, **double))
        self.again = self.tied
        self.complex = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]).to(torch.complex128))
        self.table = nn.Embedding(4, 3, sparse=True, **double)
        self.late = nn.Parameter(torch.ones(2, **double))
        self.unused = nn.Parameter(torch.ones(2, **double))
        self.frozen = nn.Parameter(torch.ones(2, **double), requires_grad=False)

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        """The mean over rows; `late` is used by those above 4."""
        x = rows.double()
        each = (self.tied.sum() + 2 * self.again.prod()) * x * self.frozen.sum()
        each = each + self.complex.abs().sum() * x
        each = each + self.table(rows % 4).square().sum(1)
        return (
            (each + self.late.sum() * (x - 4).clamp(0)).mean()
            if x.max() > 4
            else (each.mean())
        )


def test_gradients_of_every_kind_equal_those_of_the_big_batch() -> None:
    """Tied, complex, sparse; first used in the last micro-batch (pytorch#196996); never
    used, or frozen: these keep None. Others' are left as they are (keras#19538)."""
    rows, net, whole = torch.arange(1, 7), Kinds(), Kinds()
    other = nn.Parameter(torch.ones(2))
    other.grad = torch.full((2,), 7.0)
    accumulator = Accumulator(GivenWeight())
    for part in rows.split([1, 3, 2]):
        accumulator.backward(net.loss(part), len(part))
    accumulator.finish([*net.parameters(), net.tied, net.again])
    whole.loss(rows).backward()
    assert other.grad.tolist() == [7, 7]
    for (name, found), expected in zip(
        net.named_parameters(), whole.parameters(), strict=True
    ):
        assert (found.grad is None) == (name in ("unused", "frozen")), name
        if found.grad is not None:
            assert found.grad.is_sparse == (name == "table.weight")
            both = [p.grad.to_dense() for p in (found, expected)]  # type: ignore[union-attr]
            torch.testing.assert_close(*both, rtol=1e-14, atol=0)


def test_mixed_dtypes_are_scaled_alike() -> None:
    kinds = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    gradients = [torch.full((3,), 96.0, dtype=dtype) for dtype in kinds]
    scale_([*gradients, torch.empty(0)], torch.tensor(1 / 3, dtype=torch.float64))
    for gradient in gradients:
        torch.testing.assert_close(gradient, torch.full_like(gradient, 32.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scale_is_not_rounded_to_half_precision(dtype: torch.dtype) -> None:
    """bfloat16(1.003) is 1."""
    values = torch.linspace(1, 2, 200).to(dtype)
    scale = torch.tensor(1.003, dtype=torch.float64)
    found = values.clone()
    scale_([found], scale)
    assert torch.equal(found, (values.double() * scale).to(dtype))
    assert not torch.equal(found, values * scale.to(dtype))


def test_total_norm_equals_the_norm_of_all() -> None:
    a, b, none = (nn.Parameter(torch.ones(2)) for _ in range(3))
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    table = nn.Embedding(4, 1, sparse=True)
    table(torch.tensor([1, 1, 3])).sum().backward()
    for given, norm in (([a, b, none], 5.0), ([table.weight], 5**0.5)):
        assert float(total_norm(given, None)) == pytest.approx(norm)  # type: ignore[arg-type]
    assert total_norm([none], None) is None
