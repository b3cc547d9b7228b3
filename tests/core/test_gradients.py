"""What is done to gradients, whatever kind they are of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.core.conftest import OnRanks
from trainkit import Accumulator, PerSample, TrainkitError
from trainkit.core.gradients import are_finite, parameters_of, scale_, total_norm


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


@pytest.mark.parametrize("gradient", [None, 1.0, torch.nan])
@pytest.mark.parametrize("value", [1.0, torch.inf])
def test_finite_are_values_and_gradients_if_there_are_any(
    value: float, gradient: float | None
) -> None:
    parameter = nn.Parameter(torch.tensor([1, value]))
    parameter.grad = None if gradient is None else torch.tensor([gradient, 1])
    assert are_finite([parameter]) == (value == 1 and gradient in (None, 1))


class Kinds(nn.Module):
    """Parameters of every kind, not all of which each micro-batch uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        double: dict[str, Any] = {"dtype": torch.float64}
        self.tied = nn.Parameter(torch.ones(2, **double))
        self.again = self.tied
        self.single = nn.Parameter(torch.ones(2))
        self.complex = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]).to(torch.complex128))
        self.table = nn.Embedding(4, 3, sparse=True, **double)
        self.late = nn.Parameter(torch.ones(2, **double))
        self.unused = nn.Parameter(torch.ones(2, **double))
        self.frozen = nn.Parameter(torch.ones(2, **double), requires_grad=False)

    def loss(self, rows: Tensor) -> Tensor:
        """The mean over rows; those above 4 use `late` and the table."""
        factor = self.tied.sum() + 2 * self.again.prod() + self.complex.abs().sum()
        each = rows * (factor + self.single.sum() * self.frozen.sum())
        if rows.max() > 4:
            picked = self.table(rows % 4).square().sum(1)
            each = each + (picked + self.late.sum() * rows) * (rows > 4)
        return each.double().mean()


ROWS = torch.arange(1, 7)


def window(rank: int, world_size: int, wide: bool) -> dict[str, Any]:
    """The second window of an accumulator, with each rank's own micro-batches."""
    net, other = Kinds(), nn.Parameter(torch.ones(2))
    other.grad = torch.full((2,), 7.0)
    how: Any = {"aggregation": "none", "wide_gradients": wide}
    accumulator = Accumulator(PerSample(), module=net, **how)
    parts = ROWS.split([1, 3, 1, 1])
    for _ in range(2):
        net.zero_grad()
        for part in parts if world_size == 1 else parts[2 * rank : 2 * rank + 2]:
            accumulator.backward(net.loss(part), part)
        accumulator.finish([*net.parameters(), net.tied, net.again])
    assert other.grad.tolist() == [7, 7]  # keras#19538: others are left as they are
    return {name: p.grad for name, p in net.named_parameters()}


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_of_every_kind_equal_those_of_the_big_batch(
    world_size: int, wide: bool, on_ranks: OnRanks
) -> None:
    """Tied, complex, sparse; first used in a late micro-batch (pytorch#196996), or on
    another rank; never used, or frozen: these keep None."""
    whole = Kinds()
    whole.loss(ROWS).backward()
    alone = [window(0, 1, wide)] if world_size == 1 else []
    for found in alone or on_ranks(window, 2, wide):
        for name, parameter in whole.named_parameters():
            assert (found[name] is None) == (name in ("unused", "frozen")), name
            if parameter.grad is not None:
                is_table = name == "table.weight"
                stays = is_table and world_size == 1 and not wide
                assert found[name].is_sparse == stays, name
                both = [g.to_dense() for g in (found[name], parameter.grad)]
                torch.testing.assert_close(*both)


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
