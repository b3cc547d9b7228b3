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
    assert [id(p) for p in parameters_of(optimizer)] == [id(a), id(b), id(c)]
    assert len(parameters_of([a, b, a])) == 2
    assert parameters_of(a)[0] is a
    assert len(parameters_of(nn.Linear(2, 2).parameters())) == 2


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


def test_gradient_of_a_tied_parameter_is_divided_once() -> None:
    shared = nn.Parameter(torch.ones(2))
    accumulator = Accumulator(GivenWeight())
    for weight in (1, 3):
        accumulator.backward((shared * weight + 2 * shared).sum(), weight)
    accumulator.finish([shared, shared])
    assert shared.grad is not None
    assert shared.grad.tolist() == [(1 * 3 + 3 * 5) / 4] * 2


def test_sparse_gradient_equals_the_dense_one() -> None:
    indices = [torch.tensor([0, 2, 2]), torch.tensor([1]), torch.tensor([2, 0])]
    found = []
    for sparse in (True, False):
        torch.manual_seed(0)
        table = nn.Embedding(4, 3, sparse=sparse, dtype=torch.float64)
        accumulator = Accumulator(GivenWeight())
        for index in indices:
            accumulator.backward(table(index).square().mean(), len(index))
        accumulator.finish(table.parameters())
        gradient = table.weight.grad
        assert gradient is not None
        assert gradient.is_sparse == sparse
        found.append(gradient.to_dense())
    torch.testing.assert_close(found[0], found[1], rtol=1e-14, atol=0)


def test_complex_gradient_equals_big_batch() -> None:
    parameter = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128))
    data = torch.arange(1.0, 7.0, dtype=torch.float64)
    accumulator = Accumulator(GivenWeight())
    for part in data.split([1, 3, 2]):
        accumulator.backward((parameter.abs().sum() * part).mean(), len(part))
    accumulator.finish([parameter])
    (expected,) = torch.autograd.grad((parameter.abs().sum() * data).mean(), parameter)
    torch.testing.assert_close(parameter.grad, expected, rtol=1e-14, atol=0)


def test_parameters_without_a_gradient_keep_none() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    accumulator = Accumulator(GivenWeight())
    accumulator.backward((used * frozen).sum(), 3)
    accumulator.finish([used, unused, frozen])
    assert (unused.grad, frozen.grad) == (None, None)
    assert used.grad is not None
    assert used.grad.tolist() == [1.0, 1.0]


def test_parameter_used_in_one_micro_batch_equals_big_batch() -> None:
    """pytorch#196996: first used in the window's last micro-batch."""
    always, late = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))
    accumulator = Accumulator(GivenWeight())
    accumulator.backward(always * 1, 3)
    accumulator.backward(always * late * 5, 1)
    accumulator.finish([always, late])
    assert always.grad is not None
    assert late.grad is not None
    assert (float(always.grad), float(late.grad)) == ((3 * 1 + 5) / 4, 5 / 4)


def test_gradients_of_other_parameters_are_left_as_they_are() -> None:
    """keras#19538: a variable that its gradient overwrites must not be averaged."""
    mine, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    other.grad = torch.full((2,), 7.0)
    accumulator = Accumulator(GivenWeight())
    accumulator.backward(mine.sum(), 5)
    accumulator.finish([mine])
    assert other.grad.tolist() == [7.0, 7.0]


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
    norm = total_norm([a, b, none], None)
    assert norm is not None
    assert float(norm) == 5.0
    assert total_norm([none], None) is None
    table = nn.Embedding(4, 1, sparse=True)
    table(torch.tensor([1, 1, 3])).sum().backward()
    assert float(total_norm([table.weight], None) or 0) == pytest.approx(5**0.5)
