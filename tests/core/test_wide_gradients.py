"""Sums in float32 beside half-precision parameters: rounded once, on any ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import cycle
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.core.common import padded, relative
from tests.core.conftest import OnRanks
from tests.helpers import (
    TokenNet,
    gradients,
    ragged_sequences,
    token_loss,
)
from trainkit import PerToken, TrainkitError
from trainkit.core import gradients as of_gradients
from trainkit.core.ranks import Ranks, find_ranks
from trainkit.core.state import load_partial, save_partial
from trainkit.core.wide_gradients import WideGradients

ONCE = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
"""What one rounding changes at most, and nothing but that is allowed."""

SAMPLES = ragged_sequences(64 * 3, longest=40)
MICRO_BATCHES = [padded(SAMPLES[i : i + 3]) for i in range(0, len(SAMPLES), 3)]
WEIGHTS = [float(PerToken().weight(batch)) for batch in MICRO_BATCHES]
SCALE = torch.tensor(1 / sum(WEIGHTS), dtype=torch.float64)


def half_net(dtype: torch.dtype = torch.bfloat16) -> TokenNet:
    return TokenNet(dtype=dtype)


def weighted_losses(net: nn.Module) -> Iterator[Tensor]:
    for batch, weight in zip(MICRO_BATCHES, WEIGHTS, strict=True):
        yield token_loss(net, batch) * weight


def exact_gradient(net: nn.Module) -> Tensor:
    """The window's, from the same micro-batch gradients, in float64."""
    total = torch.zeros((), dtype=torch.float64)
    for loss in weighted_losses(net):
        net.zero_grad()
        loss.backward()
        total = total + gradients(net)
    net.zero_grad()
    return total * SCALE


def run_wide(net: nn.Module) -> WideGradients:
    wide = WideGradients(net.parameters())
    for loss in weighted_losses(net):
        loss.backward()
        wide.take()
    wide.hand_over(SCALE)
    return wide


# ---- one process ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ONCE, ids=str)
def test_window_of_64_equals_float64_sum_up_to_one_rounding(dtype: torch.dtype) -> None:
    """LLaMA-Factory#9769, NeMo Automodel#341."""
    net = half_net(dtype)
    expected = exact_gradient(net)
    run_wide(net)
    assert {p.grad.dtype for p in net.parameters() if p.grad is not None} == {dtype}
    assert relative(gradients(net), expected) <= ONCE[dtype]


def test_sum_in_bfloat16_is_not_up_to_one_rounding() -> None:
    """The control: autograd's own sum, each micro-batch weighted exactly."""
    net = half_net()
    expected = exact_gradient(net)
    for loss in weighted_losses(net):
        loss.backward()
    naive = relative(gradients(net) * SCALE, expected)
    net.zero_grad()
    run_wide(net)
    assert naive >= 3 * ONCE[torch.bfloat16]
    assert naive >= 4 * relative(gradients(net), expected)


def test_unused_parameter_keeps_none_and_late_one_gets_its_gradient() -> None:
    used, late, never = (nn.Parameter(torch.ones(3).bfloat16()) for _ in range(3))
    wide = WideGradients([used, late, never, used])
    for _ in range(2):  # nothing is left over for the next window
        for index in range(64):
            loss = used.sum() + (late.sum() if index == 63 else 0)
            loss.backward()
            wide.take()
        wide.hand_over(torch.tensor(0.5))
        assert used.grad is not None
        assert late.grad is not None
        assert used.grad.tolist() == [32.0] * 3
        assert late.grad.tolist() == [0.5] * 3
        assert never.grad is None
        used.grad = late.grad = None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_parameters_of_full_precision_take_part_in_their_own_dtype(
    dtype: torch.dtype,
) -> None:
    """The scale must reach these gradients too."""
    half = nn.Parameter(torch.ones(2).bfloat16())
    full = nn.Parameter(torch.ones(2, dtype=dtype))
    wide = WideGradients([half, full])
    for factor in (0.25, 3.0, 1e-3):
        loss = half.float().sum() + (full * full.conj()).real.sum() / 2
        (loss * factor).backward()
        wide.take()
    wide.hand_over(torch.tensor(2.0))
    assert full.grad is not None
    assert full.grad.dtype == dtype
    torch.testing.assert_close(full.grad, torch.full_like(full, 2 * 3.251))
    torch.testing.assert_close(half.grad, torch.full_like(half, 2 * 3.251))


def test_sparse_gradients_stay_sparse_until_a_dense_one_comes() -> None:
    table = nn.Embedding(5, 2, sparse=True, dtype=torch.bfloat16)
    wide = WideGradients(table.parameters())

    def one_pass(*, dense: bool = False) -> None:
        loss = table.weight.sum() if dense else table(torch.tensor([1, 3, 3])).sum()
        loss.backward()
        wide.take()

    one_pass()
    one_pass()
    wide.hand_over(torch.tensor(0.5))
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse
    assert table.weight.grad.to_dense()[:, 0].tolist() == [0, 1, 0, 2, 0]
    table.zero_grad()
    one_pass()
    one_pass(dense=True)
    one_pass()
    wide.hand_over(torch.tensor(2.0))
    assert table.weight.grad is not None
    assert table.weight.grad[:, 0].tolist() == [2, 6, 2, 10, 2]


def test_dropped_window_leaves_nothing() -> None:
    """A pass that failed half-way has left gradients that nobody has taken."""
    net = half_net()
    expected = exact_gradient(net)
    wide = WideGradients(net.parameters())
    (5 * token_loss(net, MICRO_BATCHES[0])).backward()
    wide.take()
    token_loss(net, MICRO_BATCHES[1]).backward()
    wide.drop()
    for loss in weighted_losses(net):
        loss.backward()
        wide.take()
    wide.hand_over(SCALE)
    assert relative(gradients(net), expected) <= ONCE[torch.bfloat16]


def test_gradient_that_was_not_taken_is_refused() -> None:
    weight = nn.Parameter(torch.ones(2, 3).bfloat16())
    wide = WideGradients([weight])
    weight.sum().backward()
    with pytest.raises(TrainkitError, match=r"1 parameters, .*\[2, 3\], have a grad"):
        wide.hand_over()


def test_window_saved_in_the_middle_equals_one_that_went_on() -> None:
    """`save_partial` takes the stand-ins, so nothing is rounded in a checkpoint."""
    nets = [half_net(), half_net()]
    run_wide(nets[0])
    wide = WideGradients(nets[1].parameters())
    for index, loss in enumerate(weighted_losses(nets[1])):
        loss.backward()
        wide.take()
        if index == 40:
            saved = save_partial(named(wide, nets[1]), None)
            wide = WideGradients(nets[1].parameters())
            load_partial(named(wide, nets[1]), saved, None)
    wide.hand_over(SCALE)
    assert torch.equal(gradients(nets[0]), gradients(nets[1]))


def named(wide: WideGradients, net: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, wide.stand_in_of(p)) for name, p in net.named_parameters()]


STEPS: dict[str, Any] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.5, momentum=0.9, weight_decay=0.1),
    "sgd foreach": lambda ps: torch.optim.SGD(ps, lr=0.5, foreach=True),
    "sgd fused": lambda ps: torch.optim.SGD(ps, lr=0.5, fused=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=False),
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
}


@pytest.mark.parametrize(("name", "clip"), [*zip(STEPS, cycle([0.01, None]))])
def test_optimizers_and_clipping_step_with_what_is_handed_over(
    name: str, clip: float | None
) -> None:
    net, reference = half_net(), half_net()
    steps = [STEPS[name](n.parameters()) for n in (net, reference)]
    expected = exact_gradient(reference)
    run_wide(net)
    sizes = [p.numel() for p in reference.parameters()]
    for parameter, part in zip(
        reference.parameters(), expected.split(sizes), strict=True
    ):
        parameter.grad = part.view_as(parameter).to(parameter.dtype)
    for module, optimizer in zip((net, reference), steps, strict=True):
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
    for own, other in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own, other)


# ---- several ranks -------------------------------------------------------------------


class Parts(nn.Module):
    """Its gradients are its inputs: sums over ranks can be told by heart."""

    alone: Tensor
    never: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("all", "late", "alone", "never", "last"):
            size = 7 if name == "last" else 3
            setattr(self, name, nn.Parameter(torch.ones(size).bfloat16()))

    def forward(self, **parts: float) -> Tensor:
        return torch.stack([getattr(self, n).sum() * v for n, v in parts.items()]).sum()


# Rank 1 has one micro-batch, of which DDP brings the last together. `late` is first
# used in the last (pytorch#196996), `alone` by rank 0 and never in a synchronised pass.
ON_RANKS: list[list[dict[str, float]]] = [
    [{"all": 256.0, "alone": 256.0}]
    + 30 * [{"all": 1.0, "alone": 1.0}]
    + [{"all": 2.0, "late": 3.0, "last": 5.0}],
    [{"all": 4.0, "late": 1.0, "last": 1.0}],
]
# (256 + 30 + 2 + 4) / 4, and so on: all of them are numbers of bfloat16.
EXPECTED = {"all": 73.0, "late": 1.0, "alone": 71.5, "never": None, "last": 1.5}


def adding_hook(state, bucket):  # DDP cannot read annotations that are strings
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda f: f.value()[0])


def wide_over_ddp(rank: int, world_size: int, case: dict[str, Any]) -> Any:
    net = Parts()
    if case.get("all used"):
        net.alone.requires_grad_(False)
        net.never.requires_grad_(False)
    ddp = DDP(
        net,
        find_unused_parameters=not case.get("all used"),
        gradient_as_bucket_view=case.get("view", False),
    )
    if case.get("sums"):
        ddp.register_comm_hook(None, adding_hook)
    ranks = find_ranks(ddp, "sum" if case.get("sums") else "auto")
    wide = WideGradients(ddp.parameters(), ranks=ranks)
    shown = []
    for _ in range(2):
        ddp.zero_grad(set_to_none=not case.get("zeros", False))
        for index, parts in enumerate(ON_RANKS[rank]):
            is_shared = index == len(ON_RANKS[rank]) - 1 and not case.get("apart")
            with contextlib.nullcontext() if is_shared else ddp.no_sync():
                ddp(**parts).backward()
            wide.take(is_shared=is_shared)
        wide.hand_over(torch.tensor(0.25 * ranks.multiplier))
        shown.append(values(ddp.module))
    return shown


def values(net: nn.Module) -> dict[str, float | None]:
    """The number that all elements of a gradient are."""
    shown: dict[str, float | None] = {}
    for name, parameter in net.named_parameters():
        if parameter.grad is None:
            shown[name] = None
        else:
            assert parameter.grad.dtype == torch.bfloat16
            (shown[name],) = parameter.grad.unique().tolist()
    return shown


DDP_CASES: dict[str, dict[str, bool]] = {
    "last synchronised": {},
    "zeroed in place": {"zeros": True},
    "none unused": {"all used": True},
    "none unused, bucket views": {"all used": True, "view": True},
    "bucket views": {"view": True},
    "never synchronised": {"apart": True, "view": True},
    "a hook that adds up": {"sums": True},
}


@pytest.mark.parametrize("case", DDP_CASES.values(), ids=DDP_CASES.keys())
def test_ddp_of_unequal_windows_equals_the_exact_sum(
    case: dict[str, Any], on_ranks: OnRanks
) -> None:
    for shown in on_ranks(wide_over_ddp, 2, case):
        expected = {**EXPECTED, **({"alone": None} if case.get("all used") else {})}
        assert shown == [expected, expected]


def wide_without_backend(rank: int, world_size: int) -> Any:
    with mock.patch.object(of_gradients, "BUCKET", 8):  # several messages
        return saved_in_the_middle(rank)


def saved_in_the_middle(rank: int) -> Any:
    net = Parts()
    wide = WideGradients(net.parameters(), ranks=find_ranks(net, "none"))
    for parts in ON_RANKS[rank]:
        net(**parts).backward()
        wide.take()
    saved = save_partial(named(wide, net), find_ranks(net, "none"))
    went_on = closed(wide, net)
    wide.drop()
    load_partial(named(wide, net), saved, find_ranks(net, "none"))
    return went_on, closed(wide, net)


def closed(wide: WideGradients, net: nn.Module) -> dict[str, float | None]:
    wide.hand_over(torch.tensor(0.25))
    return values(net)


def test_ranks_without_a_backend_equal_the_exact_sum_and_so_does_their_checkpoint(
    on_ranks: OnRanks,
) -> None:
    for results in on_ranks(wide_without_backend, 2):
        assert results == (EXPECTED, EXPECTED)


def wide_over_fsdp(rank: int, world_size: int) -> Any:
    net: Any = half_net()
    fully_shard(net)
    ranks = find_ranks(net)
    wide = WideGradients(net.parameters(), ranks=ranks)
    each = []
    for index in range(32):
        at = 2 * index + rank
        (token_loss(net, MICRO_BATCHES[at]) * WEIGHTS[at]).backward()
        each.append(whole_gradients(net))
        wide.take(is_shared=True)
        if index == 20:
            saved = save_partial(named(wide, net), ranks)
            wide.drop()
            load_partial(named(wide, net), saved, ranks)
    wide.hand_over(SCALE * ranks.multiplier)
    assert all(isinstance(p.grad, DTensor) for p in net.parameters())
    optimizer = torch.optim.AdamW(net.parameters())
    nn.utils.clip_grad_norm_(net.parameters(), 1e9)
    optimizer.step()
    return whole_gradients(net), torch.stack(each).sum(0) * 2 * SCALE


def whole_gradients(net: nn.Module) -> Tensor:
    found = [p.grad for p in net.parameters()]
    whole = [g.full_tensor() for g in found if isinstance(g, DTensor)]
    return torch.cat([g.double().flatten() for g in whole])


def test_fsdp2_equals_the_sum_of_what_it_left_up_to_one_rounding(
    on_ranks: OnRanks,
) -> None:
    """Shards are added up where they are, and handed over as shards."""
    for found, expected in on_ranks(wide_over_fsdp, 2):
        assert relative(found, expected) <= ONCE[torch.bfloat16]


@pytest.mark.parametrize("aggregation", ["mean", "sum"])
def test_backend_that_is_unknown_is_refused(aggregation: Any) -> None:
    """FSDP1 among them, whose shards do not say that they are."""
    with pytest.raises(TrainkitError, match="averaged by neither DDP nor FSDP2"):
        WideGradients(half_net().parameters(), ranks=Ranks(aggregation, size=2))
