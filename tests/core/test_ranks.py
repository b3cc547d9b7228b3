"""Who shares a window: read from the module, said by the caller, or asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.core.common import GivenWeight, fresh_net
from tests.core.conftest import OnRanks
from tests.helpers import raise_rank_errors, run_ranks, start_gloo
from trainkit import Accumulator, TrainkitError, Uniform
from trainkit.core.ranks import Ranks, find_ranks


def test_one_process_is_one_rank() -> None:
    assert find_ranks() == Ranks("none", None, 1, 0, None)
    assert find_ranks(nn.Linear(2, 2), "mean").size == 1


@pytest.mark.parametrize("wrong", ["average", None, 1])
def test_unknown_aggregation_is_refused(wrong: Any) -> None:
    with pytest.raises(TrainkitError, match=r"aggregation: must be one of.*received"):
        Accumulator(Uniform(), aggregation=wrong)


def refusals(rank: int, world_size: int) -> list[str]:
    texts = []
    given: list[dict[str, Any]] = [
        {},
        {"module": fresh_net()},
        {"process_group": dist.group.WORLD},
        {"module": object()},
    ]
    for options in given:
        with pytest.raises(TrainkitError) as error:
            Accumulator(Uniform(), **options)
        texts.append(str(error.value))
    return texts


def test_several_ranks_with_nothing_to_read_are_refused(on_ranks: OnRanks) -> None:
    """transformers#37110: to average what is averaged already, or not at all."""
    for texts in on_ranks(refusals, 2):
        for text in texts:
            assert text.startswith("aggregation: 2 ranks are running")
            assert "'mean' (the backend averages), 'sum'" in text
        assert "no module was given" in texts[0]
        assert "TokenNet does not show" in texts[1]


class Holder:
    """As Lightning's strategy object: what trains is its `model`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model


def shown(rank: int, world_size: int) -> dict[str, Any]:
    ddp = DDP(fresh_net())
    sharded = fresh_net()
    fully_shard(sharded)
    grid = fresh_net()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(grid, mesh=mesh)
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    modules: dict[str, Any] = {
        "ddp": ddp,
        "ddp inside": nn.Sequential(ddp),
        "ddp compiled": torch.compile(ddp, backend="eager"),
        "ddp of a strategy": Holder(ddp),
        "sharded": sharded,
        "sharded, of a strategy": Holder(sharded),
    }
    found = {name: find_ranks(module) for name, module in modules.items()}
    found["replicas of shards"] = find_ranks(grid)
    found["grid"] = find_ranks(grid, "mean", mesh["shard"].get_group())
    found["said"] = find_ranks(fresh_net(), "sum")
    found["alone"] = find_ranks(fresh_net(), "auto", alone)
    return {
        name: (r.aggregation, r.size, r.index, r.multiplier, r.backend_sums)
        for name, r in found.items()
    }


def summed_by_nobody(rank: int, world_size: int) -> list[str]:
    said = []
    for hook in (None, all_reduce_sum):
        net = DDP(fresh_net())
        if hook is not None:
            net.register_comm_hook(None, hook)
        accumulator = Accumulator(GivenWeight(), module=net, aggregation="sum")
        accumulator.backward(net(torch.ones(2, 3).long()).mean(), weight=1)
        try:
            accumulator.finish(net.parameters())
            said.append("")
        except TrainkitError as error:
            said.append(str(error))
    return said


def all_reduce_sum(state, bucket):  # torch reads annotations, and not as text
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def test_a_sum_that_ddp_does_not_make_is_refused(on_ranks: OnRanks) -> None:
    """The control: with a hook that adds up it is not."""
    for refused, accepted in on_ranks(summed_by_nobody, 2):
        assert "aggregation='sum'" in refused
        assert "averages" in refused
        assert accepted == ""


def test_aggregation_equals_what_the_module_shows(on_ranks: OnRanks) -> None:
    for rank, found in enumerate(on_ranks(shown, 2)):
        assert found.pop("alone") == ("none", 1, 0, 1, False)
        assert found.pop("said") == ("sum", 2, rank, 1, True)
        assert set(found.values()) == {("mean", 2, rank, 2, True)}


def said(rank: int, world_size: int, aggregation: Any) -> Any:
    """A backend of one's own: gradients are summed or averaged by hand."""
    p = nn.Parameter(torch.ones((), dtype=torch.float64))
    accumulator = Accumulator(GivenWeight(), aggregation=aggregation)
    found = []
    for weights in ([(3, 1.0)], [(1, 4.0), (2, 2.0)]):
        p.grad = None
        for weight, loss in weights:
            accumulator.backward(p * loss * (1 + rank), weight * (1 + 2 * rank))
        if aggregation != "none":
            assert p.grad is not None
            dist.all_reduce(p.grad)
            p.grad /= world_size if aggregation == "mean" else 1
        stats = accumulator.finish([p])
        found.append((float(p.grad), float(stats.loss)))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("aggregation", ["mean", "sum", "none"])
def test_each_aggregation_equals_the_law(aggregation: str, on_ranks: OnRanks) -> None:
    first = (3 * 1 + 9 * 2) / 12
    second = (1 * 4 + 2 * 2 + 3 * 8 + 6 * 4) / 12
    for found in on_ranks(said, 2, aggregation):
        assert found == [pytest.approx((x, x), rel=1e-14) for x in (first, second)]


def averaged_twice(rank: int, world_size: int) -> float:
    p = nn.Parameter(torch.ones((), dtype=torch.float64))
    accumulator = Accumulator(GivenWeight(), aggregation="sum")
    accumulator.backward(p * 1.0, 3)
    assert p.grad is not None
    dist.all_reduce(p.grad)
    p.grad /= world_size
    accumulator.finish([p])
    return float(p.grad)


def test_wrong_aggregation_differs_from_the_law(on_ranks: OnRanks) -> None:
    """The control: half the gradient, on two ranks."""
    assert on_ranks(averaged_twice, 2) == [0.5, 0.5]


def subsets(rank: int, world_size: int) -> tuple[float, float]:
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    p = nn.Parameter(torch.ones((), dtype=torch.float64))
    mine = groups[min(rank, 1)]
    accumulator = Accumulator(GivenWeight(), aggregation="none", process_group=mine)
    for weight in range(1, 2 + rank):
        accumulator.backward(p * weight, weight)
    stats = accumulator.finish([p])
    return float(stats.weight), float(p.grad)  # type: ignore[arg-type]


def test_window_of_a_process_group_equals_that_of_its_ranks(on_ranks: OnRanks) -> None:
    """Ranks that hold no replica of their own do not count."""
    alone = (1.0, 1.0)
    pair = (3.0 + 6.0, pytest.approx((1 + 4 + 1 + 4 + 9) / 9))
    assert on_ranks(subsets, 3) == [alone, pair, pair]


def rank_without_a_micro_batch(rank: int, world_size: int) -> str:
    ddp = DDP(fresh_net())
    accumulator = Accumulator(Uniform(), module=ddp)
    if rank == 0:
        with pytest.raises(TrainkitError) as error:
            accumulator.finish(ddp.parameters())
        return str(error.value)
    return ""


def test_rank_without_a_micro_batch_is_refused_where_others_wait_for_it(
    on_ranks: OnRanks,
) -> None:
    """pytorch-lightning#5243: it would hang, or mix up two messages."""
    text, _ = on_ranks(rank_without_a_micro_batch, 2)
    assert "window is empty" in text
    assert "each of them needs a micro-batch" in text


def made_too_early(rank: int, world_size: int) -> str:
    accumulator = Accumulator(GivenWeight(), aggregation="none")
    start_gloo()
    p = nn.Parameter(torch.ones(()))
    accumulator.backward(p * 1, 1)
    with pytest.raises(TrainkitError) as error:
        accumulator.finish([p])
    return str(error.value)


def test_accumulator_made_before_the_ranks_started_is_refused() -> None:
    """It would know of one rank, and divide each rank's gradient by its own weight."""
    for text in raise_rank_errors(run_ranks(made_too_early, 2)):
        assert "was 1 when it was made, and is 2 now" in text


def on_a_grid(rank: int, world_size: int) -> str:
    """Sharded over one dimension, whole over the other: tensor parallelism, perhaps."""
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("dp", "tp"))
    net = nn.Module()
    whole = torch.ones(4, 2)
    net.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0), Replicate()]))
    with pytest.raises(TrainkitError) as error:
        find_ranks(net)
    return str(error.value)


def test_grid_whose_replicas_cannot_be_read_is_refused(on_ranks: OnRanks) -> None:
    for text in on_ranks(on_a_grid, 2):
        assert "a mesh of 2 dimensions ('dp', 'tp')" in text
        assert "Pass aggregation='mean' and process_group=" in text
