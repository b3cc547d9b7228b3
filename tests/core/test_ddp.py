"""Ranks whose backend averages: DDP over gloo."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.core.common import (
    ByClass,
    GivenWeight,
    class_weighted_loss,
    fresh_net,
    padded,
    relative,
    sample_loss,
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

SAMPLES = ragged_sequences(48)
EMPTY = {"ids": torch.zeros(2, 5).long(), "labels": torch.full((2, 5), -100)}

CASES: dict[str, Any] = {
    "tokens": (PerToken, token_loss),
    "samples": (PerSample, sample_loss),
    "class weights": (ByClass, class_weighted_loss),
}

# Windows of three ranks: ragged, of different length, one rank with nothing that
# counts. Each number is a micro-batch's share of the samples; 0 is `EMPTY`.
WINDOWS = [
    [[1, 3, 1], [9], [2, 2]],
    [[5], [1, 1, 1, 2], [1]],
    [[0, 0], [7], [3, 1]],
    [[2], [2], [1, 1, 1]],
]


def dealt(windows: Any, world_size: int) -> list[list[list[Any]]]:
    """For each window and rank its micro-batches."""
    samples = iter(SAMPLES)
    result = []
    for window in windows:
        result.append([])
        for cut in window[:world_size]:
            parts = [[next(samples) for _ in range(size)] for size in cut]
            result[-1].append([padded(part) if part else EMPTY for part in parts])
    return result


def together(window: Sequence[Sequence[Any]]) -> Any:
    """All micro-batches of all ranks as one batch."""
    rows = [
        (ids[labels != -100], labels[labels != -100])
        for cut in window
        for batch in cut
        for ids, labels in zip(batch["ids"], batch["labels"], strict=True)
        if (labels != -100).any()
    ]
    return padded(rows)


def backward_all(
    net: DDP, accumulator: Accumulator, cut: Sequence[Any], loss: Any, **options: Any
) -> None:
    """One window of a rank, communicating with its last micro-batch alone."""
    no_sync = options.get("no_sync", True)
    for index, batch in enumerate(cut):
        last = index == len(cut) - 1
        with contextlib.nullcontext() if last or not no_sync else net.no_sync():
            value = loss(net, batch, accumulator.strategy.loss_reduction)
            accumulator.backward(value, batch)


# ---- equal to one process ------------------------------------------------------------


def train_ddp(rank: int, world_size: int, case: str, options: dict[str, Any]) -> Any:
    make, loss = CASES[case]
    net = fresh_net()
    wrapped = DDP(net)
    strategy = make(loss_reduction=options.get("reduction", "mean"))
    accumulator = Accumulator(strategy, module=wrapped, checks="now")
    steps = OPTIMIZERS[options.get("optimizer", "momentum")](net.parameters())
    losses = []
    for window in dealt(options.get("windows", WINDOWS), world_size):
        steps.zero_grad()
        backward_all(wrapped, accumulator, window[rank], loss, **options)
        stats = accumulator.finish(steps)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        steps.step()
        losses.append((float(stats.loss), float(stats.num_micro_batches)))
    return weights(net), losses


def train_alone(case: str, world_size: int, options: dict[str, Any]) -> Any:
    _, loss = CASES[case]
    net = fresh_net()
    steps = OPTIMIZERS[options.get("optimizer", "momentum")](net.parameters())
    losses = []
    for window in dealt(options.get("windows", WINDOWS), world_size):
        steps.zero_grad()
        value = loss(net, together(window), "mean")
        value.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        steps.step()
        losses.append((value.item(), float(sum(map(len, window)))))
    return weights(net), losses


GRID = [
    ("tokens", {}),
    ("tokens", {"reduction": "sum", "optimizer": "adamw"}),
    (
        "tokens",
        {"no_sync": False, "windows": [[[1, 3], [9, 1], [2, 2]], [[0], [5], [1]]]},
    ),
    ("class weights", {"optimizer": "sgd"}),
]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("case", "options"), GRID, ids=str)
def test_ddp_equals_one_process(
    case: str, options: dict[str, Any], world_size: int, on_ranks: OnRanks
) -> None:
    """transformers#34242, torchtune#2172, torchtitan#1842: ranks of unequal tokens and
    unequal numbers of micro-batches; open-mmlab and torchtitan: a rank with none."""
    results = on_ranks(train_ddp, world_size, case, options)
    expected, losses = train_alone(case, world_size, options)
    for found, found_losses in results:
        off = deviation(found, expected, fresh_net())
        assert off <= TOLERANCE[torch.float64]
        torch.testing.assert_close(found_losses, losses, rtol=1e-10, atol=0)


def test_ddp_with_samples_equals_one_process(on_ranks: OnRanks) -> None:
    windows = WINDOWS[:2]  # a sample without a token has no mean
    results = on_ranks(sample_gradients, 2, windows)
    for window, *found in zip(dealt(windows, 2), *results, strict=True):
        net = fresh_net()
        sample_loss(net, together(window), "mean").backward()
        for gradient in found:
            assert relative(gradient, gradients(net)) <= 1e-10


def sample_gradients(rank: int, world_size: int, windows: Any) -> list[torch.Tensor]:
    net = fresh_net()
    wrapped = DDP(net)
    accumulator = Accumulator(PerSample(), module=wrapped)
    found = []
    for window in dealt(windows, world_size):
        net.zero_grad()
        backward_all(wrapped, accumulator, window[rank], sample_loss)
        accumulator.finish(net.parameters())
        found.append(gradients(net))
    return found


def average_ddp(rank: int, world_size: int) -> torch.Tensor:
    wrapped = DDP(fresh_net())
    accumulator = Accumulator(Uniform(), module=wrapped)
    backward_all(wrapped, accumulator, dealt(WINDOWS, world_size)[0][rank], token_loss)
    accumulator.finish(wrapped.parameters())
    return gradients(wrapped)


def test_ddp_by_averages_differs_from_one_process(on_ranks: OnRanks) -> None:
    """The control: torchtune#2980, "no scaling when N = 1", needs equal tokens."""
    (found, _) = on_ranks(average_ddp, 2)
    net = fresh_net()
    token_loss(net, together(dealt(WINDOWS, 2)[0])).backward()
    assert relative(found, gradients(net)) > NAIVE


# ---- DDP's own options ---------------------------------------------------------------


def compressed(rank: int, world_size: int, large: bool) -> torch.Tensor:
    net = fresh_net(torch.float32)
    wrapped = DDP(net)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    accumulator = Accumulator(GivenWeight(), module=wrapped)
    for window in dealt(WINDOWS[:2], world_size):
        net.zero_grad()
        for index, batch in enumerate(window[rank]):
            last = index == len(window[rank]) - 1
            weight = PerToken().weight(batch) * (50_000 if large else 1)
            with contextlib.nullcontext() if last else wrapped.no_sync():
                accumulator.backward(token_loss(wrapped, batch), weight)
        accumulator.finish(net.parameters())
    return gradients(net)


@pytest.mark.parametrize("large", [False, True])
def test_compressing_hook_equals_one_process_up_to_its_rounding(
    large: bool, on_ranks: OnRanks
) -> None:
    """With r = 1, 50,000 tokens would be inf in half precision."""
    for found in on_ranks(compressed, 2, large):
        net = fresh_net(torch.float32)
        token_loss(net, together(dealt(WINDOWS[:2], 2)[1])).backward()
        assert relative(found, gradients(net)) <= 5e-3


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Parameter(torch.ones((), dtype=torch.float64)) for _ in "ab"
        )
        self.never = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: float, uses_b: bool) -> torch.Tensor:
        return self.a * x + (self.b * 10 * x if uses_b else 0)


def unused_at_the_end(rank: int, world_size: int) -> Any:
    net = TwoHeads()
    wrapped = DDP(net, find_unused_parameters=True)
    accumulator = Accumulator(GivenWeight(), module=wrapped)
    with wrapped.no_sync():
        accumulator.backward(wrapped(1.0, rank == 0), 3)
    accumulator.backward(wrapped(2.0, False), 1 + rank)
    accumulator.finish(net.parameters())
    return net.a.grad, net.b.grad, net.never.grad


def test_parameter_unused_in_the_last_micro_batch_equals_one_process(
    on_ranks: OnRanks,
) -> None:
    """pytorch#196996."""
    total = 3 + 3 + 1 + 2
    for a, b, never in on_ranks(unused_at_the_end, 2):
        assert float(a) == pytest.approx((3 + 3 + 2 * 1 + 2 * 2) / total, rel=1e-14)
        assert float(b) == pytest.approx(3 * 10 / total, rel=1e-14)
        assert never is None


def static_graph(rank: int, world_size: int) -> str:
    wrapped = DDP(fresh_net(), static_graph=True)
    accumulator = Accumulator(PerToken(), module=wrapped)
    cut = [padded(SAMPLES[:2]), padded(SAMPLES[2:4])]
    backward_all(wrapped, accumulator, cut[:1], token_loss)  # one is fine
    accumulator.finish(wrapped.parameters())
    with pytest.raises(TrainkitError, match="static_graph=False") as error:
        backward_all(wrapped, accumulator, cut, token_loss, no_sync=False)
    return str(error.value)


def test_static_graph_with_several_micro_batches_is_refused(on_ranks: OnRanks) -> None:
    for text in on_ranks(static_graph, 2):
        assert text.startswith("static_graph=True: DDP cannot")


# ---- what it costs -------------------------------------------------------------------


def count_collectives(rank: int, world_size: int) -> list[int]:
    wrapped = DDP(fresh_net())
    accumulator = Accumulator(PerToken(), module=wrapped)
    counts = []
    plain = dist.all_reduce
    for window in dealt(WINDOWS, world_size):
        calls = []

        def counted(*args: Any, _calls: list[int] = calls, **options: Any) -> Any:
            _calls.append(1)
            return plain(*args, **options)

        wrapped.zero_grad()
        cut = window[rank]
        with mock.patch.object(dist, "all_reduce", counted):
            backward_all(wrapped, accumulator, cut, token_loss)
            accumulator.finish(wrapped.parameters())
        counts.append(len(calls))
    return counts


def test_each_window_after_the_first_makes_one_collective(on_ranks: OnRanks) -> None:
    """The first one agrees on the shared scale as well."""
    for counts in on_ranks(count_collectives, 2):
        assert counts == [2, 1, 1, 1]


def in_two_wrappers(rank: int, world_size: int) -> torch.Tensor:
    torch.manual_seed(0)
    parts = [nn.Linear(2, 2, dtype=torch.float64) for _ in range(2)]
    net = nn.Sequential(DDP(parts[0]), nn.Tanh(), DDP(parts[1]))
    accumulator = Accumulator(PerSample(), module=net)
    x = torch.arange(10, dtype=torch.float64).view(5, 2)[rank * 2 : 2 + rank * 3]
    accumulator.backward(net(x).square().mean(), x)
    accumulator.finish(net.parameters())
    return gradients(net)


def test_two_wrappers_equal_one_process(on_ranks: OnRanks) -> None:
    torch.manual_seed(0)
    parts = [nn.Linear(2, 2, dtype=torch.float64) for _ in range(2)]
    net = nn.Sequential(parts[0], nn.Tanh(), parts[1])
    x = torch.arange(10, dtype=torch.float64).view(5, 2)
    net(x).square().mean().backward()
    for found in on_ranks(in_two_wrappers, 2):
        assert relative(found, gradients(net)) <= 1e-12
