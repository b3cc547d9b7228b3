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
    Toy,
    adding_hook,
    cross_entropy,
    fresh_net,
    joined,
    kl_of,
    padded,
)
from tests.core.conftest import OnRanks
from tests.helpers import NAIVE, OPTIMIZERS, TOLERANCE, deviation, ragged_sequences
from tests.zoo.modules import whole
from trainkit import Accumulator, PerSample, PerToken, TrainkitError, Uniform
from trainkit.core.ranks import Ranks

SAMPLES = ragged_sequences(30, longest=30)


def deal(backend: str, world_size: int, case: str) -> list[list[list[Any]]]:
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
        drawn = [[draw.sample(SAMPLES, n) for n in part] for part in parts]
        windows.append([[padded(x) if x else IGNORED for x in part] for part in drawn])
    return windows


def test_windows_are_ragged() -> None:
    """What they have in common: ranks of unequal tokens, and one that has none."""
    for backend in ("none", "ddp", "fsdp, each"):
        tokens = [
            [sum(int((b["labels"] != -100).sum()) for b in part) for part in window]
            for window in deal(backend, 2, "tokens")
        ]
        assert all(len(set(window)) > 1 for window in tokens)
        assert any(0 in window for window in tokens)


def terms(net: nn.Module, batch: Any, reduction: str) -> dict[str, Tensor]:
    """Two terms, of which the second stays a sum."""
    return {"ce": cross_entropy(net, batch), "kl": 0.1 * kl_of(net, batch, "sum")}


BOTH = {"ce": PerToken(), "kl": PerSample(loss_reduction="total")}


class Heavy(PerSample):
    """Counts each sample 1,000,000 times."""

    def weight(self, batch: Any) -> Any:
        return super().weight(batch) * 1_000_000


def set_up(backend: str, world_size: int, optimizer: str) -> tuple[Any, Any, Any]:
    """The model, its optimizer, and Fabric if it is there."""
    is_narrow = "bf16" in backend or "fp16" in backend
    net: Any = fresh_net(torch.float32 if is_narrow else torch.float64)
    model = net
    if "twice" in backend:
        net.embed, net.head = DDP(net.embed), DDP(net.head)
    elif "ddp" in backend:
        unused, view = "unused" in backend, "view" in backend
        how: Any = {"find_unused_parameters": unused, "gradient_as_bucket_view": view}
        model = DDP(net, **how)
    if "hook" in backend:
        model.register_comm_hook(None, adding_hook)
    if "fp16" in backend:
        model.register_comm_hook(None, fp16_compress_hook)
    if "fsdp" in backend:
        narrow: Any = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        fully_shard(net, mp_policy=MixedPrecisionPolicy(**narrow if is_narrow else {}))
        for factor in [f for f in (1.0, 2.0) if str(f) in backend]:
            net.set_gradient_divide_factor(factor)
    steps = OPTIMIZERS[optimizer](net.parameters())
    if "fabric" not in backend:
        return model, steps, None
    strategy = "auto" if world_size == 1 else "ddp"
    precision: Any = "bf16-mixed" if is_narrow else "32-true"
    how = {"devices": world_size, "strategy": strategy, "precision": precision}
    fabric = Fabric(accelerator="cpu", **how)
    fabric.launch()
    return *fabric.setup(net, steps), fabric


def make_accumulator(
    backend: str, case: str, reduction: str, model: Any
) -> Accumulator:
    words = f"{backend}, {case}".split(", ")
    strategies: Any = {"uniform": Uniform, "heavy": Heavy, "terms": lambda: BOTH}
    own = [strategies[name]() for name in strategies if name in words]
    strategy = own[0] if own else CASES[case].strategy(loss_reduction=reduction)
    said: Any = [name for name in ("none", "mean", "sum") if name in words] or ["auto"]
    how: Any = {"aggregation": said[0], "wide_gradients": "wide" in backend}
    accumulator = Accumulator(strategy, module=model, checks="now", **how)
    if "rank means" in backend:  # exact on each rank, and blind to the others
        accumulator.ranks = accumulator.division._ranks = Ranks()
        accumulator.gradients._ranks = Ranks()
    return accumulator


def not_last(backend: str, model: Any, fabric: Any, is_last: bool) -> Any:
    """The block in which a micro-batch runs."""
    if "fsdp" in backend:
        model.set_requires_gradient_sync(is_last or "each" in backend)
    elif not is_last and "each" not in backend:
        if fabric is not None:
            return fabric.no_backward_sync(model)
        if "ddp" in backend:
            return model.no_sync()
    return contextlib.nullcontext()


def train(
    rank: int,
    world_size: int,
    backend: str,
    case: str,
    reduction: Any = "mean",
    optimizer: str = "momentum",
    told: bool = False,
    alone: int = 0,
) -> tuple[Tensor, list[tuple[float, int]], list[int]]:
    """Weights after a training; each window's loss and number of micro-batches; how
    often ranks added something up. `alone`: on one process, with the batches of so many
    ranks in one."""
    dealt = deal(backend, alone or world_size, case)
    backend = "one batch" if alone else backend
    model, steps, fabric = set_up(backend, world_size, optimizer)
    accumulator = make_accumulator(backend, case, reduction, model)
    loss = terms if case == "terms" else CASES[case].loss
    apart = "apart" in backend  # no pass communicates
    losses, calls, add_up = [], [], dist.all_reduce

    def counted(*args: Any, **options: Any) -> Any:
        calls[-1] += 1
        return add_up(*args, **options)

    for window in dealt:
        calls.append(0)
        steps.zero_grad(set_to_none="zeros" not in backend)
        part = [joined([b for p in window for b in p])] if alone else window[rank]
        if not alone and (told or case == "terms"):
            accumulator.expect(part)
        with mock.patch.object(dist, "all_reduce", counted):
            for index, batch in enumerate(part):
                is_last = index == len(part) - 1 and not apart
                with not_last(backend, model, fabric, is_last):
                    means = ("mean", "sum") if alone else ("mean",)
                    reduced = "mean" if reduction in means else "sum"
                    value: Any = loss(model, batch, reduced)
                    if alone:
                        value = sum(value.values()) if case == "terms" else value
                        value.backward()
                        losses.append((value.item(), sum(map(len, window))))
                    else:
                        backward = None if fabric is None else fabric.backward
                        accumulator.backward(value, batch, backward=backward)
            if "by hand" in backend:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                    is_mean = "mean" in backend or "averaged" in backend
                    parameter.grad /= world_size if is_mean else 1
            if not alone:
                stats = accumulator.finish(steps, is_apart=apart)
                losses.append((float(stats.loss), int(stats.num_micro_batches)))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        steps.step()
    return whole(model), losses, calls


WIDE = ["none", "ddp", "ddp, view, each", "ddp, unused, zeros", "ddp, view, apart"]
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
    ("ddp, twice, each", "tokens"),
    ("ddp, apart", "tokens"),
    ("ddp, hook, sum", "tokens"),
    *((f"{backend}, wide", "tokens") for backend in WIDE),
    ("fsdp", "tokens", "mean", "adamw"),
    ("fsdp", "tokens", "sum", "adamw"),
    ("fsdp, each", "tokens", "mean", "adamw"),
    ("fsdp, each", "tokens", "sum", "adamw", True),
    ("fsdp, factor 1.0, each", "tokens", "mean", "adamw"),  # as in torchtitan
    ("fsdp, factor 1.0, sum", "tokens", "mean", "adamw"),
    ("fsdp, factor 2.0", "tokens", "mean", "adamw"),
    ("fabric", "tokens", "mean", "adamw"),
    ("fabric, each", "tokens", "sum", "adamw"),
    ("mean, by hand", "tokens"),
    ("sum, by hand", "tokens", "sum"),
]
NEAR = {"fsdp, bf16": 2e-2, "fabric, bf16": 2e-2, "ddp, fp16": 5e-3}
NEAR["ddp, fp16, heavy"] = 5e-3  # with r = 1, such weights would be inf
NAIVES = [
    "ddp, uniform",  # torchtune#2980: "no scaling when N = 1" needs equal tokens
    "mean, by hand, rank means",  # verl#6609: a denominator for each rank
    "sum, by hand, averaged",  # transformers#37110: half the gradient
]


@pytest.mark.parametrize(
    ("world_size", "how"),
    [
        *((2, how) for how in GRID),
        *((3, how) for how in (GRID[0], ("none", "terms"), GRID[4], GRID[9])),
        (1, ("fabric", "tokens", "mean", "adamw")),
        (1, ("fabric, bf16", "samples")),
        *((2, (backend, "samples")) for backend in [*NEAR, *NAIVES]),
    ],
    ids=str,
)
def test_ranks_equal_one_process_and_naive_ways_do_not(
    world_size: int, how: Any, on_ranks: OnRanks
) -> None:
    """transformers#34242, torchtune#2172, torchtitan#1842: ranks of unequal tokens and
    unequal numbers of micro-batches; open-mmlab and torchtitan: a rank with none."""
    alone = world_size == 1
    results = [train(0, 1, *how)] if alone else on_ranks(train, world_size, *how)
    expected, losses, _ = train(0, 1, *how, alone=world_size)
    for found, found_losses, _ in results:
        off = deviation(found, expected, fresh_net())
        if how[0] in NAIVES:
            assert off > NAIVE
            continue
        assert off <= NEAR.get(how[0], TOLERANCE[torch.float64])
        near = NEAR.get(how[0], 1e-10)
        torch.testing.assert_close(found_losses, losses, rtol=near, atol=0)


def test_each_window_after_the_first_makes_one_collective(on_ranks: OnRanks) -> None:
    """The first one agrees on the shared scale as well."""
    for _, _, calls in on_ranks(train, 2, "ddp", "tokens"):
        assert calls == [2, 1, 1, 1, 1, 1]


def flagged(rank: int, world_size: int, kind: str, checks: Any) -> str:
    toy = Toy(aggregation="none", checks=checks)
    bad: Any = {"weight": [(1, torch.tensor(-1))], "loss": [(torch.nan, 2)]}
    mine = bad.get(kind, []) if rank > 0 or kind == "empty" else [(1, 2)]
    toy.window((1, 2))
    if checks == "late":
        toy.window(*mine)
    with pytest.raises(TrainkitError) as error:
        toy.window(*mine)
    return f"after {toy.accumulator.num_windows} windows: {error.value}"


@pytest.mark.parametrize("kind", ["weight", "loss", "empty"])
@pytest.mark.parametrize(("checks", "seen"), [("late", 3), ("now", 2)])
def test_flag_stops_every_rank_and_names_the_one(
    kind: str, checks: Any, seen: int, on_ranks: OnRanks
) -> None:
    for text in on_ranks(flagged, 3, kind, checks):
        assert text.startswith(f"after {seen} windows: optimizer step 1 ")
        assert ("window was empty" if kind == "empty" else "ranks 1, 2: ") in text
