"""Who shares a window: read from the module, said by the caller, or refused."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.core.common import Toy, adding_hook, fresh_net, padded, run_window
from tests.core.conftest import OnRanks
from tests.helpers import (
    gradients,
    ragged_sequences,
    raise_rank_errors,
    run_ranks,
    start_gloo,
    token_loss,
)
from trainkit import Accumulator, PerSample, PerToken, TrainkitError, Uniform
from trainkit.core._compat import (
    has_reduced,
    owe_forward_messages,
    send_forward_messages,
)
from trainkit.core.ranks import Ranks, find_ranks

BATCH = padded(ragged_sequences(2))

# ---- what the module shows -----------------------------------------------------------


def test_one_process_is_one_rank() -> None:
    assert find_ranks() == Ranks("none", None, 1, 0, None)
    assert find_ranks(nn.Linear(2, 2), "mean").size == 1


@pytest.mark.parametrize("wrong", ["average", None, 1])
def test_unknown_aggregation_is_refused(wrong: Any) -> None:
    with pytest.raises(TrainkitError, match=r"aggregation: must be one of.*received"):
        Accumulator(Uniform(), aggregation=wrong)


class Holder:
    """As Lightning's strategy object: what trains is its `model`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model


class SingleDeviceStrategy(Holder):
    """As Lightning's, whose rank trains alone beside others."""


def sharded(**options: Any) -> Any:
    net = fresh_net()
    fully_shard(net, **options)
    return net


def shown(rank: int, world_size: int) -> dict[str, Any]:
    ddp, shards = DDP(fresh_net()), sharded()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    grid = sharded(mesh=mesh)
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    found = {
        "ddp": find_ranks(ddp),
        "ddp inside": find_ranks(nn.Sequential(ddp)),
        "ddp compiled": find_ranks(torch.compile(ddp, backend="eager")),
        "ddp of a strategy": find_ranks(Holder(ddp)),
        "ddp over a group": find_ranks(ddp, "auto", alone),
        "sharded": find_ranks(shards),
        "sharded, of a strategy": find_ranks(Holder(shards)),
        "grid": find_ranks(grid, "mean", mesh["shard"].get_group()),
        "said": find_ranks(fresh_net(), "sum"),
        "alone": find_ranks(fresh_net(), "auto", alone),
        "one device": find_ranks(SingleDeviceStrategy(fresh_net())),
    }
    return {
        name: (r.aggregation, r.size, r.index, r.multiplier, r.backend_sums)
        for name, r in found.items()
    }


def test_aggregation_equals_what_the_module_shows(on_ranks: OnRanks) -> None:
    for rank, found in enumerate(on_ranks(shown, 2)):
        assert found.pop("alone") == ("none", 1, 0, 1, False)
        assert found.pop("one device") == ("none", 1, 0, 1, False)
        assert found.pop("ddp over a group") == ("mean", 1, 0, 1, False)
        assert found.pop("said") == ("sum", 2, rank, 1, True)
        assert set(found.values()) == {("mean", 2, rank, 2, True)}


def subsets(rank: int, world_size: int) -> tuple[float, float]:
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    toy = Toy(aggregation="none", process_group=groups[min(rank, 1)])
    stats = toy.window(*((weight, weight) for weight in range(1, 2 + rank)))
    return float(stats.weight), toy.gradient


def test_window_of_a_process_group_equals_that_of_its_ranks(on_ranks: OnRanks) -> None:
    """Ranks that hold no replica of their own do not count."""
    alone = (1.0, 1.0)
    pair = (3.0 + 6.0, pytest.approx((1 + 4 + 1 + 4 + 9) / 9))
    assert on_ranks(subsets, 3) == [alone, pair, pair]


# ---- what is refused -----------------------------------------------------------------


def step(
    *,
    hook: Any = None,
    frozen: bool = False,
    ignored: bool = False,
    outside: bool = False,
    inside: str = "",
    **options: Any,
) -> None:
    """A window of one micro-batch under DDP."""
    net, other = fresh_net(), nn.Parameter(torch.ones((), dtype=torch.float64))
    net.embed.requires_grad_(not frozen)
    if ignored:
        DDP._set_params_and_buffers_to_ignore_for_model(net, ["embed.weight"])
    ddp: Any = DDP(net)
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    accumulator = Accumulator(PerToken(), module=ddp, **options)
    net.requires_grad_()
    with getattr(ddp, inside)() if inside else contextlib.nullcontext():
        loss = token_loss(ddp, BATCH) * (other if outside else 1)
        accumulator.backward(loss, BATCH)
    accumulator.finish([*net.parameters(), *([other] if outside else [])])


def static_graph(first: str) -> None:
    """A window of one micro-batch is fine; two are not, nor is one that resumes."""
    ddp = DDP(fresh_net(), static_graph=True)
    accumulator = Accumulator(PerToken(), module=ddp)
    run_window(ddp, [BATCH], accumulator)
    if first == "told":
        accumulator.expect([BATCH, BATCH])
    accumulator.backward(token_loss(ddp, BATCH), BATCH)
    if first == "resumed":
        state = accumulator.state_dict()
        accumulator = Accumulator(PerToken(), module=ddp)
        accumulator.load_state_dict(state)
    accumulator.backward(token_loss(ddp, BATCH), BATCH)


class Buffered(nn.Module):
    """Two layers, of which a pass may use one, and a buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Linear(2, 1).double() for _ in range(2))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        total = self.first(x).sum()
        return total + self.second(x).sum() if both else total


ROWS = torch.ones(3, 2, dtype=torch.float64)


def unfinished() -> None:
    """A parameter that only an earlier, unsynchronised pass has used: torch would say
    so in the next forward pass, when each rank has stepped with its own gradient."""
    ddp = DDP(Buffered())
    accumulator = Accumulator(PerSample(), module=ddp)
    accumulator.expect([ROWS, ROWS])
    assert has_reduced(ddp)
    with ddp.no_sync():
        accumulator.backward(ddp(ROWS, True), ROWS)
    accumulator.backward(ddp(ROWS, False), ROWS)
    assert not has_reduced(ddp)
    accumulator.finish(ddp.parameters())


def unknown_grid() -> None:
    """Sharded over one dimension, whole over the other: tensor parallelism, perhaps."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    net = nn.Module()
    shards = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0), Replicate()])
    net.weight = nn.Parameter(shards)
    find_ranks(net)


def replicas_of_shards() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    find_ranks(sharded(mesh=mesh))


def half_sharded(**options: Any) -> None:
    net = fresh_net()
    fully_shard(net.head)
    accumulator = Accumulator(PerToken(), module=net, **options)
    accumulator.backward(token_loss(net, BATCH), BATCH)
    accumulator.finish(net.parameters())


def divided_by_3() -> None:
    net = sharded()
    net.set_gradient_divide_factor(3.0)
    find_ranks(net)


def saved_too_early() -> None:
    """Gradients that FSDP2 holds back must not be lost in a checkpoint."""
    net = sharded()
    net.set_requires_gradient_sync(False)
    accumulator = Accumulator(PerToken(), module=net)
    accumulator.backward(token_loss(net, BATCH), BATCH)
    accumulator.state_dict(over_ranks=True)


def make(aggregation: Any = "auto", **options: Any) -> Accumulator:
    return Accumulator(Uniform(), aggregation=aggregation, **options)


ASKS = "aggregation: 2 ranks are running, and"
NOT_AVERAGED = "are not averaged by DDP or FSDP2"
EMPTY = "the window is empty, so it has no gradient. Call backward() at least once"
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    # transformers#37110: to average what is averaged already, or not at all
    "no module": (make, f"{ASKS} no module was given"),
    "no backend": (lambda: make(module=fresh_net()), f"{ASKS} TokenNet does not show"),
    "no net": (lambda: make(module=object()), f"{ASKS} object does not show"),
    "a group": (lambda: make(process_group=dist.group.WORLD), "averages), 'sum'"),
    "none": (lambda: step(aggregation="none"), "='none': the module is Distributed"),
    "sum": (lambda: step(aggregation="sum"), "='sum': must be what DDP does to gr"),
    "sum, torch's hook": (
        lambda: step(hook=allreduce_hook, aggregation="sum"),
        "allreduce_hook'] it averages them. Name what it leaves",
    ),
    "sum by a hook": (lambda: step(hook=adding_hook, aggregation="sum"), "accepted"),
    "noop hook": (lambda: step(hook=noop_hook), "noop_hook'] it may not average them"),
    "own hook": (lambda: step(hook=adding_hook), "adding_hook'] it may not average t"),
    "torch's hook": (lambda: step(hook=allreduce_hook), "accepted"),
    "mean by a hook": (lambda: step(hook=adding_hook, aggregation="mean"), "accepted"),
    "outside": (lambda: step(outside=True), f"the first of shape [], {NOT_AVERAGED}"),
    "frozen when wrapped": (lambda: step(frozen=True), NOT_AVERAGED),
    "ignored": (lambda: step(ignored=True), NOT_AVERAGED),
    "no_sync": (lambda: step(inside="no_sync"), "backward pass ran under no_sync()"),
    "static": (lambda: static_graph(""), "static_graph=True: DDP cannot"),
    "static, told": (lambda: static_graph("told"), "a window of several micro-batches"),
    "static, resumed": (lambda: static_graph("resumed"), "static_graph=False"),
    "unfinished": (unfinished, "DDPStrategy(find_unused_parameters=True)"),
    # pytorch-lightning#5243: it would hang, or mix up two messages
    "empty": (lambda: make(module=DDP(fresh_net())).finish([ROWS]), EMPTY),
    "grid": (unknown_grid, "2 dimensions ('dp', 'tp'), and which of them hold"),
    "hsdp": (replicas_of_shards, "2 dimensions ('replicate', 'shard'), and which of"),
    "half sharded": (
        half_sharded,
        f"1 to be stepped, the first of shape [13, 8], {NOT_AVERAGED}",
    ),
    "half sharded, by hand": (lambda: half_sharded(aggregation="mean"), "accepted"),
    "divided by 3": (divided_by_3, "makes FSDP divide by ['3.0'] over 2 ranks"),
    "saved too early": (saved_too_early, "backward pass with set_requires_gradient"),
}


def refused(rank: int, world_size: int, name: str) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            REFUSED[name][0]()
        except TrainkitError as error:
            return str(error)
    return " ".join(["accepted", *(str(warning.message) for warning in caught)])


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_on_ranks_is_refused(name: str, on_ranks: OnRanks) -> None:
    """Or announced, or accepted, which is the control."""
    for text in on_ranks(refused, 2, name):
        assert REFUSED[name][1] in text


def made_too_early(rank: int, world_size: int) -> str:
    toy = Toy(aggregation="none")
    start_gloo()
    with pytest.raises(TrainkitError) as error:
        toy.window((1, 1))
    return str(error.value)


def test_accumulator_made_before_the_ranks_started_is_refused() -> None:
    """It would know of one rank, and divide each rank's gradient by its own weight."""
    for text in raise_rank_errors(run_ranks(made_too_early, 2)):
        assert "was 1 when it was made, and is 2 now" in text


# ---- what DDP does between the passes ------------------------------------------------


def backward_alone(rank: int, world_size: int) -> float:
    """The forward pass decides whether ranks are apart, and it is outside."""
    ddp = DDP(nn.Linear(1, 1, bias=False, dtype=torch.float64))
    accumulator = Accumulator(PerSample(), module=ddp)
    loss = ddp(torch.full((1, 1), 1.0 + rank, dtype=torch.float64)).sum()
    with ddp.no_sync():
        accumulator.backward(loss, weight=1 + rank)
    accumulator.finish(ddp.parameters())
    return gradients(ddp).item()


def test_backward_pass_alone_may_run_under_no_sync(on_ranks: OnRanks) -> None:
    assert on_ranks(backward_alone, 2) == [pytest.approx(5 / 3)] * 2


def messages(rank: int, world: int) -> list[Any]:
    net = Buffered()
    ddp = DDP(net)
    seen: list[Any] = []
    for _ in range(2):  # the second time with DDP's rebuilt buckets
        net.count.fill_(rank + 5)
        ddp.zero_grad()
        send_forward_messages(ddp)
        seen.append(float(net.count))
        net.count.fill_(rank + 7)
        with ddp.no_sync():
            if rank == 0:  # nothing waits for the other rank
                ddp(ROWS, True)
        seen.append(float(net.count))
        owe_forward_messages(ddp)
        ddp(ROWS * (rank + 1), True).backward()
        seen += [float(net.count), gradients(net).tolist()]
    return seen


def test_messages_of_a_forward_pass_are_sent_before_it(on_ranks: OnRanks) -> None:
    """Of the first rank's buffers, and once of the order of the buckets."""
    first, second = on_ranks(messages, 2)
    assert first[0] == second[0] == first[4] == second[4] == 5.0
    assert (first[1], second[1]) == (7.0, 8.0)
    assert first[2] == second[2] == 7.0
    assert first[3] == second[3] == first[7] == second[7]
