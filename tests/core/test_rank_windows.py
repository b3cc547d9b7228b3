"""Windows of several ranks, on each backend, equal one process with one batch."""

from __future__ import annotations

import contextlib
import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.core.common import (
    CASES,
    IGNORED,
    GivenWeight,
    cross_entropy,
    fresh_net,
    joined,
    kl_of,
    padded,
    relative,
    whole,
    whole_gradients,
)
from tests.core.conftest import OnRanks
from tests.helpers import (
    NAIVE,
    OPTIMIZERS,
    TOLERANCE,
    deviation,
    gradients,
    ragged_sequences,
    token_loss,
    weights,
)
from trainkit import Accumulator, PerSample, PerToken, TrainkitError, Uniform
from trainkit.core.ranks import Ranks

SAMPLES = ragged_sequences(30, longest=30)


def deal(backend: str, world_size: int, case: str = "tokens") -> list[list[list[Any]]]:
    """For each window and rank its micro-batches: any samples, cut anywhere.

    Where no backend communicates, some ranks get none. Where each forward or backward
    pass does, all get as many. Where tokens are counted, some get nothing that counts.
    """
    draw, windows = random.Random(world_size), []
    least = 0 if backend == "none" and case != "terms" else 1
    sizes = [0, 0, 1, 2, 5, 9] if case == "tokens" else [1, 2, 5, 9]
    for _ in range(6):
        counts = [draw.randint(least, 3) for _ in range(world_size)]
        if "each" in backend or "fsdp" in backend:
            counts = [max(counts)] * world_size
        parts = [[draw.choice(sizes) for _ in range(count)] for count in counts]
        if not any(map(sum, parts)):
            parts[-1] = [*parts[-1][1:], 4]
        windows.append(
            [
                [padded(draw.sample(SAMPLES, n)) if n else IGNORED for n in part]
                for part in parts
            ]
        )
    return windows


def test_windows_are_ragged() -> None:
    """What they have in common: ranks of unequal tokens, and one that has none."""
    for backend in ("none", "ddp", "fsdp, each"):
        windows = deal(backend, 2)
        tokens = [
            [sum(int((b["labels"] != -100).sum()) for b in part) for part in window]
            for window in windows
        ]
        assert all(len(set(of_window)) > 1 for of_window in tokens)
        assert any(0 in of_window for of_window in tokens)
    assert any([] in window for window in deal("none", 2))


# ---- trainings -----------------------------------------------------------------------


def terms(net: nn.Module, batch: Any, reduction: str) -> dict[str, Tensor]:
    """Two terms, of which the second stays a sum."""
    return {"ce": cross_entropy(net, batch), "kl": 0.1 * kl_of(net, batch, "sum")}


BOTH = {"ce": PerToken(), "kl": PerSample(loss_reduction="total")}


def set_up(backend: str, world_size: int, optimizer: str) -> tuple[Any, ...]:
    """The model, its optimizer, Fabric if it is there, and options."""
    net: Any = fresh_net()
    fabric: Any = None
    options: dict[str, Any] = {}
    model = net
    if "ddp" in backend:
        model = DDP(net)
    if "fsdp" in backend:
        fully_shard(net)
        for factor in [f for f in (1.0, 2.0) if str(f) in backend]:
            net.set_gradient_divide_factor(factor)
    for said in ("none", "mean by hand", "sum by hand"):
        if said in backend:
            options["aggregation"] = said.split()[0]
    if "said sum" in backend:
        options["aggregation"] = "sum"
    steps = OPTIMIZERS[optimizer](net.parameters())
    if "fabric" in backend:
        devices = 1 if "alone" in backend else world_size
        strategy = "auto" if devices == 1 else "ddp"
        fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy)
        fabric.launch()
        model, steps = fabric.setup(net, steps)
    return model, net, steps, fabric, {**options, "module": model}


def not_last(backend: str, model: Any, fabric: Any, is_last: bool) -> Any:
    """The block in which a micro-batch runs."""
    if "fsdp" in backend:
        model.set_requires_gradient_sync(is_last or "each" in backend)
    if is_last or "each" in backend:
        return contextlib.nullcontext()
    if fabric is not None:
        return fabric.no_backward_sync(model)
    return model.no_sync() if "ddp" in backend else contextlib.nullcontext()


def train(
    rank: int,
    world_size: int,
    backend: str,
    case: str,
    reduction: Any = "mean",
    optimizer: str = "momentum",
    told: bool = False,
) -> tuple[Tensor, list[tuple[float, int]]]:
    """Weights after a training, and each window's loss and number of micro-batches."""
    model, net, steps, fabric, options = set_up(backend, world_size, optimizer)
    strategy, loss = BOTH, terms
    if case != "terms":
        make, loss, _ = CASES[case]
        strategy = make(loss_reduction=reduction)
    if "uniform" in backend:
        strategy = Uniform()
    accumulator = Accumulator(strategy, checks="now", **options)
    if "rank means" in backend:  # exact on each rank, and blind to the others
        accumulator.ranks = accumulator.division._ranks = Ranks()
        accumulator.gradients._ranks = Ranks()
    losses = []
    for window in deal(backend, world_size, case):
        steps.zero_grad()
        part = window[rank]
        if told or case == "terms":
            accumulator.expect(part)
        for index, batch in enumerate(part):
            with not_last(backend, model, fabric, index == len(part) - 1):
                is_mean = reduction == "mean"
                value = loss(model, batch, "mean" if is_mean else "sum")
                backward = None if fabric is None else fabric.backward
                accumulator.backward(value, batch, backward=backward)
        if "hand" in backend:
            for parameter in net.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size if "mean" in backend else 1
        stats = accumulator.finish(steps)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        steps.step()
        losses.append((float(stats.loss), int(stats.num_micro_batches)))
    flat = torch.cat([whole(p).detach().flatten() for p in net.parameters()])
    return flat, losses


def train_alone(
    world_size: int,
    backend: str,
    case: str,
    reduction: Any = "mean",
    optimizer: str = "momentum",
    told: bool = False,
) -> tuple[Tensor, list[tuple[float, int]]]:
    """The same on one process, with one batch for each window."""
    net, losses = fresh_net(), []
    _, loss, _ = CASES.get(case, (None, terms, None))
    steps = OPTIMIZERS[optimizer](net.parameters())
    for window in deal(backend, world_size, case):
        steps.zero_grad()
        batch = joined([batch for part in window for batch in part])
        value = loss(net, batch, "sum" if reduction == "total" else "mean")
        if isinstance(value, dict):
            value = torch.stack([*value.values()]).sum()
        value.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        steps.step()
        losses.append((float(value.detach()), sum(map(len, window))))
    return weights(net), losses


GRID: list[tuple[Any, ...]] = [
    ("none", "tokens"),
    ("none", "tokens", "sum", "adamw"),
    ("none", "tokens", "total", "adamw"),
    ("none", "samples"),
    ("ddp", "tokens"),
    ("ddp", "tokens", "sum", "adamw"),
    ("ddp", "tokens", "total", "adamw"),
    ("ddp", "tokens", "total", "adamw", True),
    ("ddp", "tokens", "mean", "sgd", True),
    ("ddp", "class weights", "mean", "sgd"),
    ("ddp", "samples", "mean", "adamw"),
    ("ddp", "terms"),
    ("ddp, each", "tokens"),
    ("fsdp", "tokens", "mean", "adamw"),
    ("fsdp", "tokens", "sum", "adamw"),
    ("fsdp, each", "tokens", "mean", "adamw"),
    ("fsdp, each", "tokens", "sum", "adamw", True),
    ("fsdp, factor 1.0, each", "tokens", "mean", "adamw"),  # as in torchtitan
    ("fsdp, factor 1.0, said sum", "tokens", "mean", "adamw"),
    ("fsdp, factor 2.0", "tokens", "mean", "adamw"),
    ("fabric", "tokens", "mean", "adamw"),
    ("fabric, each", "tokens", "sum", "adamw"),
    ("mean by hand", "tokens"),
    ("sum by hand", "tokens", "sum"),
]


def assert_equal_to_one_process(results: Any, world_size: int, how: Any) -> None:
    expected, losses = train_alone(world_size, *how)
    for found, found_losses in results:
        off = deviation(found, expected, fresh_net())
        assert off <= TOLERANCE[torch.float64]
        torch.testing.assert_close(found_losses, losses, rtol=1e-10, atol=0)


@pytest.mark.parametrize("how", GRID, ids=str)
def test_two_ranks_equal_one_process(how: Any, on_ranks: OnRanks) -> None:
    """transformers#34242, torchtune#2172, torchtitan#1842: ranks of unequal tokens and
    unequal numbers of micro-batches; open-mmlab and torchtitan: a rank with none."""
    assert_equal_to_one_process(on_ranks(train, 2, *how), 2, how)


@pytest.mark.parametrize("how", [GRID[0], ("none", "terms"), GRID[4], GRID[9]], ids=str)
def test_three_ranks_equal_one_process(how: Any, on_ranks: OnRanks) -> None:
    assert_equal_to_one_process(on_ranks(train, 3, *how), 3, how)


def test_fabric_on_one_process_equals_big_batches() -> None:
    how: Any = ("fabric, alone", "tokens", "mean", "adamw")
    assert_equal_to_one_process([train(0, 1, *how)], 1, how)


@pytest.mark.parametrize(
    "backend",
    [
        "ddp, uniform",  # torchtune#2980: "no scaling when N = 1" needs equal tokens
        "mean by hand, rank means",  # verl#6609: a denominator for each rank
        "mean by hand, said sum",  # transformers#37110: half the gradient
    ],
)
def test_naive_ways_differ_from_one_process(backend: str, on_ranks: OnRanks) -> None:
    """The control."""
    expected, _ = train_alone(2, backend, "samples")
    for found, _ in on_ranks(train, 2, backend, "samples"):
        assert deviation(found, expected, fresh_net()) > NAIVE


# ---- up to rounding ------------------------------------------------------------------


def narrow(rank: int, world_size: int, backend: str, scale: int) -> Tensor:
    net: Any = fresh_net(torch.float32)
    model, backward = net, None
    if backend == "fsdp":
        dtypes: Any = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        fully_shard(net, mp_policy=MixedPrecisionPolicy(**dtypes))
    elif backend == "ddp":
        model = DDP(net)
        model.register_comm_hook(None, fp16_compress_hook)
    else:
        fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
        model = fabric.setup_module(net)
        backward = fabric.backward
    accumulator = Accumulator(GivenWeight(), module=model)
    for window in deal("each", world_size)[:2]:
        net.zero_grad()
        for batch in window[rank]:
            weight = PerToken().weight(batch) * scale
            loss = token_loss(model, batch)
            accumulator.backward(loss, weight=weight, backward=backward)
        accumulator.finish(net.parameters())
    return whole_gradients(net)


@pytest.mark.parametrize(
    ("backend", "scale", "near"),
    [("fsdp", 1, 2e-2), ("ddp", 1, 5e-3), ("ddp", 50_000, 5e-3), ("fabric", 1, 2e-2)],
)
def test_narrow_messages_equal_one_process_up_to_rounding(
    backend: str, scale: int, near: float, on_ranks: OnRanks
) -> None:
    """With r = 1, 50,000 times the tokens would be inf in a compressing hook."""
    world_size = 1 if backend == "fabric" else 2
    net = fresh_net(torch.float32)
    batches = [b for part in deal("each", world_size)[1] for b in part]
    token_loss(net, joined(batches)).backward()
    alone = [narrow(0, 1, backend, scale)] if world_size == 1 else []
    for found in alone or on_ranks(narrow, 2, backend, scale):
        assert relative(found, gradients(net)) <= near


# ---- parameters that not every rank uses ---------------------------------------------


class Parts(nn.Module):
    """Parameters that not every micro-batch uses, one with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        kinds: dict[str, Any] = {"dtype": torch.float64}
        self.all = nn.Parameter(torch.ones(2, **kinds))
        self.first = nn.Parameter(torch.ones(3, **kinds))
        self.never = nn.Parameter(torch.ones(2, **kinds))
        self.frozen = nn.Parameter(torch.ones(2, **kinds), requires_grad=False)
        self.narrow = nn.Parameter(torch.ones(2, dtype=torch.float32))
        self.table = nn.Embedding(4, 2, sparse=True, **kinds)

    def loss(self, rank: int, x: float) -> Tensor:
        value = (self.all.sum() + self.narrow.sum()) * x + 0 * self.frozen.sum()
        if rank == 0:
            return value + (self.first * x).sum()
        return value + self.table(torch.tensor([1, 1, 3])).sum() * 0.1 * x


def unevenly_used(rank: int, world_size: int) -> dict[str, Any]:
    parts = Parts()
    accumulator = Accumulator(GivenWeight(), aggregation="none")
    for weight, x in [(3, 1.0), (1, 2.0)] if rank == 0 else [(4, 5.0)]:
        accumulator.backward(parts.loss(rank, x), weight)
    accumulator.finish(parts.parameters())
    return {n: p.grad for n, p in parts.named_parameters()}


def test_parameters_used_on_some_ranks_equal_big_batch(on_ranks: OnRanks) -> None:
    parts = Parts()
    losses = [3 * parts.loss(0, 1.0), parts.loss(0, 2.0), 4 * parts.loss(1, 5.0)]
    (torch.stack(losses).sum() / 8).backward()
    for found in on_ranks(unevenly_used, 2):
        for name, parameter in parts.named_parameters():
            if parameter.grad is None:
                assert found[name] is None, name
            else:
                both = [g.to_dense() for g in (found[name], parameter.grad)]
                torch.testing.assert_close(*both)


def two_layers(wrap: Any) -> nn.Sequential:
    torch.manual_seed(0)
    first, last = (nn.Linear(2, 2, dtype=torch.float64) for _ in range(2))
    return nn.Sequential(wrap(first), nn.Tanh(), wrap(last))


def in_two_wrappers(rank: int, world_size: int, x: Tensor) -> Tensor:
    net = two_layers(DDP)
    accumulator = Accumulator(PerSample(), module=net)
    own = x[rank * 2 : 2 + rank * 3]
    accumulator.backward(net(own).square().mean(), own)
    accumulator.finish(net.parameters())
    return gradients(net)


def test_two_wrappers_equal_one_process(on_ranks: OnRanks) -> None:
    net = two_layers(lambda layer: layer)
    x = torch.arange(10, dtype=torch.float64).view(5, 2)
    net(x).square().mean().backward()
    for found in on_ranks(in_two_wrappers, 2, x):
        assert relative(found, gradients(net)) <= 1e-12


# ---- what it costs, and what stops all ranks -----------------------------------------


def count_collectives(rank: int, world_size: int) -> list[int]:
    wrapped = DDP(fresh_net())
    accumulator = Accumulator(PerToken(), module=wrapped)
    plain, calls = dist.all_reduce, []

    def counted(*args: Any, **options: Any) -> Any:
        calls[-1] += 1
        return plain(*args, **options)

    with mock.patch.object(dist, "all_reduce", counted):
        for window in deal("ddp", world_size):
            calls.append(0)
            wrapped.zero_grad()
            for index, batch in enumerate(window[rank]):
                with not_last("ddp", wrapped, None, index == len(window[rank]) - 1):
                    accumulator.backward(token_loss(wrapped, batch), batch)
            accumulator.finish(wrapped.parameters())
    return calls


def test_each_window_after_the_first_makes_one_collective(on_ranks: OnRanks) -> None:
    """The first one agrees on the shared scale as well."""
    for counts in on_ranks(count_collectives, 2):
        assert counts == [2, 1, 1, 1, 1, 1]


def flagged(rank: int, world_size: int, kind: str, checks: Any) -> str:
    p = nn.Parameter(torch.ones(()))
    accumulator = Accumulator(GivenWeight(), aggregation="none", checks=checks)

    def window(is_bad: bool) -> None:
        weight = torch.tensor(-1.0 if is_bad and kind == "weight" else 2.0)
        loss = float("nan") if is_bad and kind == "loss" else 1.0
        if not (is_bad and kind == "empty"):
            accumulator.backward(p * loss, weight)
        accumulator.finish([p])

    is_bad = rank > 0 or kind == "empty"
    window(False)
    if checks == "late":
        window(is_bad)
    with pytest.raises(TrainkitError) as error:
        window(is_bad)
    assert p.grad is not None
    if kind == "empty":
        assert float(p.grad) == 1  # not multiplied by 0 / 0
    return f"after {accumulator.num_windows} windows: {error.value}"


@pytest.mark.parametrize(
    ("kind", "checks", "seen"),
    [
        *(("weight", *when) for when in (("late", 3), ("now", 2))),
        *(("loss", *when) for when in (("late", 3), ("now", 2))),
        ("empty", "now", 2),
    ],
)
def test_flag_stops_every_rank_and_names_the_one(
    kind: str, checks: Any, seen: int, on_ranks: OnRanks
) -> None:
    for text in on_ranks(flagged, 3, kind, checks):
        assert text.startswith(f"after {seen} windows: optimizer step 1 ")
        assert ("window was empty" if kind == "empty" else "ranks 1, 2: ") in text
