"""What is done to gradients, whatever kind they are of; sums in float32 beside
half-precision parameters are rounded once, on any ranks."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.core.common import GivenWeight, cut, fresh_net, relative, whole_gradients
from tests.core.conftest import OnRanks
from tests.helpers import TOLERANCE, gradients, ragged_sequences, token_loss, weights
from trainkit import Accumulator, PerSample, PerToken, TrainkitError
from trainkit.core import ranks as of_ranks
from trainkit.core.gradients import are_finite, parameters_of, scale_, total_norm
from trainkit.core.ranks import Ranks
from trainkit.core.wide_gradients import WideGradients


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
def test_finite_are_values_and_gradients_if_any(value: float, gradient: Any) -> None:
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


NUMBERS = torch.arange(1, 7)


def window(rank: int, world_size: int, wide: bool) -> dict[str, Any]:
    """The second window of an accumulator, with each rank's own micro-batches."""
    net, other = Kinds(), nn.Parameter(torch.ones(2))
    other.grad = torch.full((2,), 7.0)
    how: Any = {"aggregation": "none", "wide_gradients": wide}
    accumulator = Accumulator(PerSample(), module=net, **how)
    parts = NUMBERS.split([1, 3, 1, 1])
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
    whole.loss(NUMBERS).backward()
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


# ---- sums in float32 -----------------------------------------------------------------

ONCE = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
"""What one rounding changes at most, and nothing but that is allowed."""

PARTS = cut(ragged_sequences(64 * 3, longest=40), [3] * 64)


def run(
    net: nn.Module, batches: Any = PARTS, *, wide: bool = True, saved_after: int = -1
) -> tuple[Tensor, Tensor]:
    """A window's gradient, and the sum in float64 of what its passes have left."""
    each = []

    def backward(loss: Tensor) -> None:
        loss.backward()
        each.append(whole_gradients(net))

    accumulator = Accumulator(PerToken(), module=net, wide_gradients=wide)
    for index, batch in enumerate(batches):
        accumulator.backward(token_loss(net, batch), batch, backward=backward)
        if index == saved_after:
            state = accumulator.state_dict(over_ranks=True)
            accumulator = Accumulator(PerToken(), module=net, wide_gradients=wide)
            accumulator.load_state_dict(state)
    reference: Any = accumulator.division.reference
    stats = accumulator.finish(net.parameters())
    unit = reference * accumulator.ranks.multiplier / stats.weight
    return whole_gradients(net), torch.stack(each).sum(0) * unit


@pytest.mark.parametrize("dtype", ONCE, ids=str)
def test_window_of_64_equals_float64_sum_up_to_one_rounding(dtype: torch.dtype) -> None:
    """LLaMA-Factory#9769, NeMo Automodel#341; the control is autograd's own sum. In a
    checkpoint inside the window nothing is rounded."""
    net, naive, resumed = (fresh_net(dtype) for _ in range(3))
    found, expected = run(net)
    assert {p.grad.dtype for p in net.parameters() if p.grad is not None} == {dtype}
    off = relative(found, expected)
    assert off <= ONCE[dtype]
    control, _ = run(naive, wide=False)
    assert relative(control, expected) >= 3 * max(off, ONCE[dtype] / 3)
    assert torch.equal(run(resumed, saved_after=40)[0], found)


def of(*parameters: Tensor) -> Accumulator:
    """An accumulator whose windows have the sum of their losses' gradients."""
    module = nn.ParameterList(parameters)
    return Accumulator(GivenWeight("total"), module=module, wide_gradients=True)


def half(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(*shape, dtype=torch.bfloat16))


def test_dropped_window_leaves_nothing() -> None:
    """A pass that failed half-way has left gradients that nobody has taken."""
    weight = half(3)
    accumulator = of(weight)

    def fails(loss: Tensor) -> None:
        loss.backward()
        raise RuntimeError("out of memory")

    accumulator.backward(weight.sum() * 5, 1)
    with pytest.raises(RuntimeError, match="out of memory"):
        accumulator.backward(weight.sum() * 7, 1, backward=fails)
    accumulator.drop()
    accumulator.backward(weight.sum() * 2, 1)
    accumulator.finish([weight])
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0] * 3


def test_gradient_that_did_not_go_through_the_accumulator_is_added() -> None:
    """As it is where gradients are added up in the parameters."""
    weight = half(2, 3)
    accumulator = of(weight)
    accumulator.backward(weight.sum(), 1)
    weight.sum().backward()
    accumulator.finish([weight])
    assert weight.grad is not None
    assert weight.grad.unique().tolist() == [2.0]


def test_module_and_backend_must_be_known() -> None:
    """FSDP is none: its gradients are shards."""
    with pytest.raises(TrainkitError, match="wide_gradients=True: needs the module"):
        Accumulator(PerToken(), wide_gradients=True)
    for aggregation in ("mean", "sum"):
        text = (
            f"works in one process, .* received aggregation='{aggregation}' without DDP"
        )
        with pytest.raises(TrainkitError, match=text):
            WideGradients([half(2)], ranks=Ranks(aggregation, size=2))


def test_optimizers_and_clipping_step_with_what_is_handed_over() -> None:
    """Fused ones refuse a `grad` of another dtype than the parameter's."""
    for make in (torch.optim.SGD, torch.optim.AdamW):
        kinds: Any = ({"foreach": False}, {"foreach": True}, {"fused": True})
        for how in kinds:
            net, reference = (fresh_net(torch.bfloat16) for _ in range(2))
            _, expected = run(net, PARTS[:8])
            parts = expected.split([p.numel() for p in reference.parameters()])
            for parameter, part in zip(reference.parameters(), parts, strict=True):
                parameter.grad = part.view_as(parameter).to(parameter.dtype)
            for module in (net, reference):
                nn.utils.clip_grad_norm_(module.parameters(), 0.01)
                make(module.parameters(), lr=0.01, weight_decay=0.1, **how).step()
            torch.testing.assert_close(weights(net), weights(reference))


# ---- parameters that join later ------------------------------------------------------

ROWS = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)).double()


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("when", ["between two windows", "inside one", "not in module"])
def test_unfrozen_parameters_equal_the_big_batch(when: str, wide: bool) -> None:
    """Those outside of the module are divided too."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    net[0].requires_grad_(when == "not in module")
    module = net[2] if when == "not in module" else net
    accumulator = Accumulator(PerSample(), module=module, wide_gradients=wide)
    for window in range(2):
        if (window, when) == (1, "between two windows"):
            net[0].requires_grad_(True)
        net.zero_grad()
        expected = 0
        parts = ROWS.split([1, 5, 2, 4])
        for number, x in enumerate(parts):
            if (window, number, when) == (0, 2, "inside one"):
                net[0].requires_grad_(True)
            loss = net(x).square().mean()
            training = [p for p in net.parameters() if p.requires_grad]
            own = torch.autograd.grad(loss, training, retain_graph=True)
            flat = torch.cat([g.flatten() for g in own]) * len(x) / len(ROWS)
            missing = flat.new_zeros(25 - len(flat))  # of those that are frozen
            expected = expected + torch.cat([missing, flat])
            accumulator.backward(loss, x)
        accumulator.finish(net.parameters())
        found = gradients(net)
        assert relative(found, expected[-len(found) :]) <= TOLERANCE[torch.float64]  # type: ignore[index]


# ---- several ranks: see test_rank_windows.py too -------------------------------------


class Summing(nn.Module):
    """Its gradients are its inputs: sums over ranks can be told by heart."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ParameterList([half(1), half(8)])

    def forward(self, x: float) -> Tensor:
        return torch.stack([p.sum() * x for p in self.all]).float().sum()


def summed_on_ranks(rank: int, world_size: int, backend: str) -> Any:
    unused = "unused" in backend
    model: Any = Summing()
    if backend != "none":
        model = DDP(model, find_unused_parameters=unused)
    how: Any = {"module": model, "aggregation": "none" if backend == "none" else "auto"}
    accumulator = Accumulator(GivenWeight("total"), wide_gradients=True, **how)
    parts = [256.0, *[1.0] * (64 - 32 * rank)]
    for index, part in enumerate(parts):
        apart = backend != "none" and index < len(parts) - 1
        with model.no_sync() if apart else contextlib.nullcontext():
            accumulator.backward(model(part), 1)
        assert all((p.grad is None) != unused for p in model.parameters())
    with mock.patch.object(of_ranks, "BUCKET", 8):  # several messages
        accumulator.finish(model.parameters())
    return [p.grad.unique().tolist() for p in model.parameters()]


@pytest.mark.parametrize("backend", ["none", "ddp", "ddp, unused"])
def test_ranks_are_summed_in_float32_too(backend: str, on_ranks: OnRanks) -> None:
    for found in on_ranks(summed_on_ranks, 2, backend):
        assert found == [[2 * 256 + 64 + 32]] * 2


def wide_over_fsdp(rank: int, world_size: int) -> str:
    net: Any = fresh_net(torch.bfloat16)
    fully_shard(net)
    with pytest.raises(TrainkitError) as error:
        Accumulator(PerToken(), module=net, wide_gradients=True)
    return str(error.value)


def test_fsdp2_is_refused(on_ranks: OnRanks) -> None:
    """Its shards would be added up one by one."""
    for text in on_ranks(wide_over_fsdp, 2):
        assert "received aggregation='mean' without DDP" in text
