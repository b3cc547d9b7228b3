"""A checkpoint inside a window: the resumed window equals the one that went on."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.core.common import (
    IGNORED,
    GivenWeight,
    Toy,
    big_batch,
    cut,
    fresh_net,
    padded,
    relative,
    run_open,
    run_window,
    whole_gradients,
)
from tests.core.conftest import OnRanks
from tests.helpers import NAIVE, gradients, ragged_sequences
from trainkit import Accumulator, PerToken, TrainkitError

SAMPLES = ragged_sequences(24)
PARTS = cut(SAMPLES, (1, 3, 5, 7, 2, 6))
FIRST, SECOND = PARTS[:3], PARTS[3:]
WHOLE, _ = big_batch(fresh_net(), padded(SAMPLES))


def through_a_file(state: Any) -> Any:
    """As a checkpoint is written and read: tensors, numbers and strings only."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# ---- one process ---------------------------------------------------------------------


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_resumed_window_equals_big_batch(reduction: Any, warm: bool) -> None:
    """transformers#22143: the partial gradients and totals come back, in a new process
    or in one that goes back to its checkpoint. Without them it is the control."""
    strategy = PerToken(loss_reduction=reduction)
    net, resumed = fresh_net(), fresh_net()
    accumulator = Accumulator(strategy, module=net)
    if warm:  # r is then the last window's
        run_window(net, [padded(SAMPLES)], accumulator)
        net.zero_grad()
    run_open(accumulator, net, FIRST)
    state = accumulator.state_dict()
    run_open(accumulator, net, SECOND)  # must not change what was saved
    went_on = accumulator.finish(net.parameters())
    num_windows = accumulator.num_windows
    anew = Accumulator(strategy, module=resumed)
    for again, model in ((anew, resumed), (accumulator, net)):
        again.load_state_dict(through_a_file(state))
        assert again.is_open
        assert again.num_micro_batches == 3
        run_open(again, model, SECOND)
        stats = again.finish(model.parameters())
        assert relative(gradients(model), WHOLE) <= 1e-12
        assert stats.num_micro_batches == 6
        for name in ("weight", "loss", "imbalance"):
            pair = getattr(stats, name), getattr(went_on, name)
            torch.testing.assert_close(*pair, rtol=1e-12, atol=0)
        assert again.num_windows == num_windows
    control = fresh_net()
    run_window(control, SECOND, PerToken())
    assert relative(gradients(control), WHOLE) > NAIVE


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


def test_scaler_may_change_its_factor_between_saving_and_loading() -> None:
    """Another of its optimizers steps meanwhile. The gradients keep the factor with
    which the window was opened."""
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=16.0)

    def open_toy() -> Toy:
        toy = Toy(scaler=scaler)
        toy.accumulator.module = nn.ParameterList([toy.parameter])
        return toy

    def add(toy: Toy, loss: int) -> None:
        toy.add(loss, 1, backward=lambda value: scaler.scale(value).backward())

    toy, again = open_toy(), open_toy()
    scaler.scale(torch.ones(()))
    add(toy, 2)
    state = through_a_file(toy.accumulator.state_dict())
    scaler.update(64.0)
    again.accumulator.load_state_dict(state)
    add(again, 4)
    again.finish()
    assert again.gradient / scaler.get_scale() == 3


def test_parameter_not_used_yet_keeps_no_gradient() -> None:
    net = nn.ParameterDict({"used": torch.ones(2), "unused": torch.ones(2)})
    accumulator = Accumulator(GivenWeight(), module=net)
    accumulator.backward(net["used"].sum(), 3)
    state = accumulator.state_dict()
    assert list(state["gradients"]) == ["used"]
    net["unused"].grad = torch.ones(2)
    accumulator.load_state_dict(state)
    assert net["unused"].grad is None


@pytest.mark.parametrize(
    ("other", "change", "text"),
    [
        (nn.Linear(2, 2), {}, "holds partial gradients of .*no such parameter.*saved"),
        (fresh_net(), {"strategy": "PerSample (sum)"}, r"weighed by PerSample \(sum\)"),
        (fresh_net(), {"rank": 1}, "window of rank 1, and this is rank 0.*over_ranks="),
    ],
)
def test_window_of_another_run_is_refused(other: Any, change: Any, text: str) -> None:
    net = fresh_net()
    accumulator = Accumulator(PerToken(), module=net)
    run_open(accumulator, net, FIRST)
    state = {**accumulator.state_dict(), **change}
    with pytest.raises(TrainkitError, match=text):
        Accumulator(PerToken(), module=other).load_state_dict(state)


def test_module_that_has_no_gradient_in_the_window_is_refused() -> None:
    net = fresh_net()
    accumulator = Accumulator(PerToken(), module=fresh_net())
    run_open(accumulator, net, FIRST)
    with pytest.raises(TrainkitError, match="no parameter of `module` has a gradient"):
        accumulator.state_dict()


def test_a_window_that_was_announced_is_refused() -> None:
    """What it still expects cannot be saved. The control: it can between windows."""
    net = fresh_net()
    accumulator = Accumulator(PerToken(), module=net)
    accumulator.expect(FIRST)
    assert accumulator.state_dict()
    run_open(accumulator, net, FIRST[:1])
    with pytest.raises(TrainkitError, match=r"a window that expect\(\) has announced"):
        accumulator.state_dict()


@pytest.mark.parametrize("wrong", [{"gradients": {}}, 3, None])
def test_what_no_accumulator_has_saved_is_refused(wrong: Any) -> None:
    with pytest.raises(TrainkitError, match=r"load_state_dict\(\): must be what Accum"):
        Accumulator(PerToken()).load_state_dict(wrong)


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
    if kind == "ddp":
        net.require_backward_grad_sync = False
    # The ranks' first weights differ, and so may the scale that each one takes.
    first = FIRST[:1] if rank == 0 else FIRST[1:]
    if kind == "sharded" and rank == 0:  # each backward pass communicates
        first = [*first, IGNORED]
    run_open(accumulator, net, first)
    state = through_a_file(accumulator.state_dict(over_ranks=over_ranks))
    if not over_ranks:
        net, accumulator = wrapped(kind)
        accumulator.load_state_dict(state)
    if kind == "ddp":
        net.require_backward_grad_sync = True
    run_open(accumulator, net, SECOND[:1] if rank == 0 else [padded(SAMPLES[16:])])
    accumulator.finish(net.parameters())
    return state, whole_gradients(net)


def load_and_go_on(rank: int, world_size: int, kind: str, state: Any) -> Tensor:
    net, accumulator = wrapped(kind)
    accumulator.load_state_dict(state)
    run_open(accumulator, net, SECOND[rank : rank + 1])
    stats = accumulator.finish(net.parameters())
    assert int(stats.weight) == sum(len(ids) for ids, _ in SAMPLES)
    return whole_gradients(net)


@pytest.mark.parametrize("kind", ["none", "ddp", "sharded"])
def test_window_resumed_by_each_rank_is_exact(kind: str, on_ranks: OnRanks) -> None:
    for _, found in on_ranks(save_and_go_on, 2, kind, False):
        assert relative(found, WHOLE) <= 1e-10


@pytest.mark.parametrize("loading", ["none", "ddp", "sharded"])
@pytest.mark.parametrize("saving", ["none", "ddp", "sharded"])
def test_window_of_two_ranks_resumed_by_any_number_equals_big_batch(
    saving: str, loading: str, on_ranks: OnRanks
) -> None:
    results = on_ranks(save_and_go_on, 2, saving, True)
    for state, found in results:
        assert relative(found, WHOLE) <= 1e-10
        alone = fresh_net()
        accumulator = Accumulator(PerToken(), module=alone)
        accumulator.load_state_dict(state)
        run_window(alone, SECOND, accumulator)
        assert relative(gradients(alone), WHOLE) <= 1e-10
    for found in on_ranks(load_and_go_on, 3, loading, results[0][0]):
        assert relative(found, WHOLE) <= 1e-10


def one_rank_has_nothing(rank: int, world_size: int) -> Tensor:
    net, accumulator = wrapped("none")
    run_open(accumulator, net, FIRST if rank == 1 else [])
    state = accumulator.state_dict(over_ranks=True)
    again, other = wrapped("none")
    other.load_state_dict(state)
    assert other.is_open
    run_window(again, SECOND if rank == 0 else [], other)
    return gradients(again)


def test_state_over_ranks_waits_for_no_rank_without_a_batch(on_ranks: OnRanks) -> None:
    for found in on_ranks(one_rank_has_nothing, 2):
        assert relative(found, WHOLE) <= 1e-10


class Branching(nn.Module):
    """Has a weight that only a window's first micro-batch uses, and sparse rows."""

    def __init__(self) -> None:
        super().__init__()
        double: dict[str, Any] = {"dtype": torch.float64}
        self.always = nn.Parameter(torch.ones((), **double))
        self.once = nn.Parameter(torch.ones((), **double))
        self.never = nn.Parameter(torch.ones((), **double))
        self.table = nn.Embedding(4, 1, sparse=True, **double)
        nn.init.ones_(self.table.weight)

    def forward(self, x: float, use: bool, row: Any) -> Tensor:
        picked = self.table(torch.tensor(row)).sum()
        return self.always * x * (self.once if use else 1) + picked


def branch(rank: int, world_size: int, resumes: bool, wide: bool) -> Any:
    def begin() -> tuple[Any, Accumulator]:
        ddp = DDP(Branching(), find_unused_parameters=True)
        return ddp, Accumulator(GivenWeight(), module=ddp, wide_gradients=wide)

    ddp, accumulator = begin()
    with ddp.no_sync():
        accumulator.backward(ddp(1.0 + rank, True, [rank, 1]), 2)
    if resumes:
        state = through_a_file(accumulator.state_dict(over_ranks=True))
        ddp, accumulator = begin()
        accumulator.load_state_dict(state)
    accumulator.backward(ddp(4.0, False, [3 - rank]), 1 + rank)
    accumulator.finish(ddp.parameters())
    always, once, never, table = (p.grad for p in ddp.parameters())
    assert table.is_sparse != wide
    return [float(always), float(once)], never, table.to_dense().flatten()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("resumes", [False, True])
def test_weight_that_the_rest_of_a_window_does_not_use_equals_big_batch(
    resumes: bool, wide: bool, on_ranks: OnRanks
) -> None:
    """DDP brings together only what the last backward passes have used; pytorch#196996.
    Sparse gradients stay sparse."""
    expected = [(2 * 1 + 2 * 2 + 4 * 1 + 4 * 2) / 7, (2 * 1 + 2 * 2) / 7]
    for found, never, table in on_ranks(branch, 2, resumes, wide):
        assert found == pytest.approx(expected, rel=1e-12)
        assert never is None
        assert table.tolist() == pytest.approx([2 / 7, (2 + 2 * 2) / 7, 2 / 7, 1 / 7])
