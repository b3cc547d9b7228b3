"""A checkpoint inside a window: the resumed window equals the one that went on."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.core.common import GivenWeight, fresh_net, padded, relative, run_window
from tests.core.conftest import OnRanks
from tests.helpers import (
    NAIVE,
    gradients,
    ragged_sequences,
    token_loss,
)
from trainkit import Accumulator, PerToken, TrainkitError

SAMPLES = ragged_sequences(24)
FIRST = [padded(SAMPLES[0:1]), padded(SAMPLES[1:4]), padded(SAMPLES[4:9])]
SECOND = [padded(SAMPLES[9:16]), padded(SAMPLES[16:18]), padded(SAMPLES[18:24])]


def big_gradient() -> torch.Tensor:
    net = fresh_net()
    token_loss(net, padded(SAMPLES)).backward()
    return gradients(net)


def through_a_file(state: Any) -> Any:
    """As a checkpoint is written and read: tensors, numbers and strings only."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def gradient_of(module: nn.Module) -> torch.Tensor:
    found = [p.grad for p in module.parameters() if p.grad is not None]
    return torch.cat(
        [(g.full_tensor() if isinstance(g, DTensor) else g).flatten() for g in found]
    )


def run_open(accumulator: Accumulator, net: Any, cut: Any) -> None:
    for batch in cut:
        accumulator.backward(
            token_loss(net, batch, accumulator.strategy.loss_reduction), batch
        )


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_resumed_window_equals_big_batch(reduction: Any, warm: bool) -> None:
    """transformers#22143: the partial gradients and totals come back."""
    strategy = PerToken(loss_reduction=reduction)
    net = fresh_net()
    accumulator = Accumulator(strategy, module=net)
    if warm:  # r is then the last window's
        run_window(net, [padded(SAMPLES)], accumulator)
        net.zero_grad()
    run_open(accumulator, net, FIRST)
    state = through_a_file(accumulator.state_dict())
    run_open(accumulator, net, SECOND)  # must not change what was saved
    went_on = accumulator.finish(net.parameters())

    resumed = fresh_net()
    other = Accumulator(strategy, module=resumed)
    other.load_state_dict(state)
    assert other.is_open
    run_open(other, resumed, SECOND)
    stats = other.finish(resumed.parameters())
    assert relative(gradients(resumed), big_gradient()) <= 1e-12
    assert stats.num_micro_batches == 6
    for name in ("weight", "loss", "imbalance"):
        torch.testing.assert_close(
            getattr(stats, name), getattr(went_on, name), rtol=1e-12, atol=0
        )
    assert other.num_windows == accumulator.num_windows


def test_resumed_window_without_its_gradients_differs() -> None:
    """The control."""
    net = fresh_net()
    run_window(net, SECOND, PerToken())
    assert relative(gradients(net), big_gradient()) > NAIVE


def test_resumed_window_forgets_what_was_there() -> None:
    """A run that goes back to its checkpoint in the same process."""
    net = fresh_net()
    accumulator = Accumulator(PerToken(), module=net)
    run_open(accumulator, net, FIRST)
    state = accumulator.state_dict()
    run_open(accumulator, net, [padded(SAMPLES)])
    accumulator.load_state_dict(state)
    run_open(accumulator, net, SECOND)
    accumulator.finish(net.parameters())
    assert relative(gradients(net), big_gradient()) <= 1e-12


def test_state_between_windows_holds_no_gradients() -> None:
    net = fresh_net()
    accumulator = Accumulator(PerToken(), module=net)
    run_window(net, FIRST, accumulator)
    state = through_a_file(accumulator.state_dict())
    assert (state["totals"], state["gradients"]) == (None, {})
    other = Accumulator(PerToken(), module=fresh_net())
    other.load_state_dict(state)
    assert not other.is_open
    assert other.num_windows == 1


def test_state_of_another_model_is_refused() -> None:
    net = fresh_net()
    accumulator = Accumulator(PerToken(), module=net)
    run_open(accumulator, net, FIRST)
    other = Accumulator(PerToken(), module=nn.Linear(2, 2))
    with pytest.raises(TrainkitError, match="no such parameter.*was saved"):
        other.load_state_dict(accumulator.state_dict())


def test_parameter_not_used_yet_keeps_no_gradient() -> None:
    net = nn.ParameterDict({"used": torch.ones(2), "unused": torch.ones(2)})
    accumulator = Accumulator(GivenWeight(), module=net)
    accumulator.backward(net["used"].sum(), 3)
    state = accumulator.state_dict()
    assert list(state["gradients"]) == ["used"]
    net["unused"].grad = torch.ones(2)
    accumulator.load_state_dict(state)
    assert net["unused"].grad is None


# ---- several ranks -------------------------------------------------------------------


def wrapped(kind: str) -> tuple[Any, Accumulator]:
    net: Any = fresh_net()
    if kind == "ddp":
        net = DDP(net)
    elif kind == "sharded":
        fully_shard(net)
    aggregation: Any = "auto" if kind != "none" else "none"
    return net, Accumulator(PerToken(), module=net, aggregation=aggregation)


def save_and_go_on(rank: int, world_size: int, kind: str, over_ranks: bool) -> Any:
    net, accumulator = wrapped(kind)
    block = kind == "ddp"
    if block:
        net.require_backward_grad_sync = False
    # The ranks' first weights differ, and so may the scale that each one takes.
    run_open(accumulator, net, FIRST[:1] if rank == 0 else FIRST[1:])
    if kind == "sharded" and rank == 0:  # each backward pass communicates
        run_open(
            accumulator,
            net,
            [{k: v * 0 - 100 * (k == "labels") for k, v in FIRST[0].items()}],
        )
    state = through_a_file(accumulator.state_dict(over_ranks=over_ranks))
    if not over_ranks:
        net, accumulator = wrapped(kind)
        accumulator.load_state_dict(state)
    if block:
        net.require_backward_grad_sync = True
    run_open(accumulator, net, SECOND[:1] if rank == 0 else [padded(SAMPLES[16:])])
    accumulator.finish(net.parameters())
    return state, gradient_of(net)


def load_and_go_on(rank: int, world_size: int, kind: str, state: Any) -> Any:
    net, accumulator = wrapped(kind)
    accumulator.load_state_dict(state)
    cut = [SECOND[:1], SECOND[1:2], SECOND[2:]][rank]
    run_open(accumulator, net, cut)
    stats = accumulator.finish(net.parameters())
    assert int(stats.weight) == sum(len(ids) for ids, _ in SAMPLES)
    return gradient_of(net)


@pytest.mark.parametrize("kind", ["none", "ddp", "sharded"])
def test_window_resumed_by_each_rank_equals_big_batch(
    kind: str, on_ranks: OnRanks
) -> None:
    for _, found in on_ranks(save_and_go_on, 2, kind, False):
        assert relative(found, big_gradient()) <= 1e-10


@pytest.mark.parametrize("loading", ["none", "ddp", "sharded"])
@pytest.mark.parametrize("saving", ["none", "ddp", "sharded"])
def test_window_of_two_ranks_resumed_by_any_number_equals_big_batch(
    saving: str, loading: str, on_ranks: OnRanks
) -> None:
    results = on_ranks(save_and_go_on, 2, saving, True)
    for state, found in results:
        assert relative(found, big_gradient()) <= 1e-10
        alone = fresh_net()
        accumulator = Accumulator(PerToken(), module=alone)
        accumulator.load_state_dict(state)
        run_open(accumulator, alone, SECOND)
        accumulator.finish(alone.parameters())
        assert relative(gradients(alone), big_gradient()) <= 1e-10
    state = results[0][0]
    for found in on_ranks(load_and_go_on, 3, loading, state):
        assert relative(found, big_gradient()) <= 1e-10


def one_rank_has_nothing(rank: int, world_size: int) -> Any:
    net, accumulator = wrapped("none")
    if rank == 1:
        run_open(accumulator, net, FIRST)
    state = accumulator.state_dict(over_ranks=True)
    again, other = wrapped("none")
    other.load_state_dict(state)
    assert other.is_open
    run_open(other, again, SECOND if rank == 0 else [])
    other.finish(again.parameters())
    return gradient_of(again)


def test_state_over_ranks_waits_for_no_rank_without_a_micro_batch(
    on_ranks: OnRanks,
) -> None:
    for found in on_ranks(one_rank_has_nothing, 2):
        assert relative(found, big_gradient()) <= 1e-10


def of_another_rank(rank: int, world_size: int) -> str:
    net, accumulator = wrapped("none")
    run_open(accumulator, net, FIRST)
    state = accumulator.state_dict()
    state["rank"] = 1 - rank
    with pytest.raises(TrainkitError) as error:
        accumulator.load_state_dict(state)
    return str(error.value)


def test_state_of_another_rank_is_refused(on_ranks: OnRanks) -> None:
    texts = on_ranks(of_another_rank, 2)
    assert "window of rank 1, and this is rank 0" in texts[0]
    assert "one with over_ranks=True" in texts[1]


def test_window_of_another_strategy_is_refused() -> None:
    net = fresh_net()
    accumulator = Accumulator(PerToken(), module=net)
    run_open(accumulator, net, FIRST)
    state = through_a_file(accumulator.state_dict())
    other = Accumulator(PerToken(loss_reduction="sum"), module=net)
    with pytest.raises(TrainkitError, match=r"weighed by PerToken \(mean\), and this"):
        other.load_state_dict(state)


class Branching(nn.Module):
    """Has a weight that only the first micro-batch of a window uses."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.once = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: float, use: bool) -> torch.Tensor:
        return self.always * x * (self.once if use else 1)


def branch(rank: int, world_size: int, resumes: bool) -> list[float]:
    net = Branching()
    ddp = DDP(net, find_unused_parameters=True)
    accumulator = Accumulator(GivenWeight(), module=ddp)
    with ddp.no_sync():
        accumulator.backward(ddp(1.0 + rank, True), 2)
    if resumes:
        state = through_a_file(accumulator.state_dict(over_ranks=True))
        net.zero_grad()
        accumulator = Accumulator(GivenWeight(), module=ddp)
        accumulator.load_state_dict(state)
    accumulator.backward(ddp(4.0, False), 1 + rank)
    accumulator.finish(net.parameters())
    return [float(p.grad) for p in net.parameters()]  # type: ignore[arg-type]


@pytest.mark.parametrize("resumes", [False, True])
def test_weight_that_the_rest_of_a_window_does_not_use_equals_big_batch(
    resumes: bool, on_ranks: OnRanks
) -> None:
    """DDP brings together only what the last backward passes have used."""
    expected = [(2 * 1 + 2 * 2 + 4 * 1 + 4 * 2) / 7, (2 * 1 + 2 * 2) / 7]
    for found in on_ranks(branch, 2, resumes):
        assert found == pytest.approx(expected, rel=1e-12)


def sparse(rank: int, world_size: int, resumes: bool) -> list[list[float]]:
    table = nn.Embedding(4, 1, sparse=True, dtype=torch.float64)
    nn.init.ones_(table.weight)
    ddp = DDP(table)
    accumulator = Accumulator(GivenWeight(), module=ddp)
    with ddp.no_sync():
        accumulator.backward(ddp(torch.tensor([rank, 1])).sum(), 2)
    if resumes:
        state = through_a_file(accumulator.state_dict(over_ranks=True))
        table.zero_grad()
        accumulator = Accumulator(GivenWeight(), module=ddp)
        accumulator.load_state_dict(state)
    accumulator.backward(ddp(torch.tensor([3 - rank])).sum(), 1 + rank)
    accumulator.finish(ddp.parameters())
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse
    return table.weight.grad.to_dense().tolist()


@pytest.mark.parametrize("resumes", [False, True])
def test_sparse_window_over_ranks_equals_big_batch(
    resumes: bool, on_ranks: OnRanks
) -> None:
    expected = [[2 / 7], [(2 + 2 * 2) / 7], [2 / 7], [1 / 7]]
    for found in on_ranks(sparse, 2, resumes):
        assert torch.tensor(found).allclose(torch.tensor(expected))
