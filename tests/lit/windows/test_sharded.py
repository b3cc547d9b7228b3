"""Sharded parameters train what one process with the big batch trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Replicate

from tests.helpers import (
    NAIVE,
    TOLERANCE,
    TokenModule,
    deviation,
    ragged_sequences,
    raise_rank_errors,
    rank_loader,
    run_ranks,
    train_on_windows,
    trainer,
    windows_over_ranks,
)
from tests.lit.resume.test_rank_checkpoints import (
    INSIDE,
    FromBatch,
    Save,
    off_long_windows,
)
from tests.lit.resume.test_rank_checkpoints import WINDOW as LONG_WINDOW
from tests.lit.windows.several import Case, run_cases
from trainkit import AccumulationCallback, PerToken, WindowMonitor

EXACT = TOLERANCE[torch.float64]
DATA = ragged_sequences(36)
BATCH, WINDOW = 4, 2


class ShardedModule(TokenModule):
    """FSDP2 over the data-parallel ranks, the head split over the others."""

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if mesh is None or any(isinstance(p, DTensor) for p in self.parameters()):
            return
        if mesh["tensor_parallel"].size() > 1:
            split = ColwiseParallel(output_layouts=Replicate())
            parallelize_module(self.net, mesh["tensor_parallel"], {"head": split})
        if mesh["data_parallel"].size() > 1:
            fully_shard(self.net, mesh=mesh["data_parallel"])


def whole(module: torch.nn.Module) -> Tensor:
    """All parameters as one vector, gathered from their shards."""
    full = [
        p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()
    ]
    return torch.cat([p.detach().double().flatten() for p in full])


def mesh_strategy(replicas: int, split: int) -> ModelParallelStrategy:
    return ModelParallelStrategy(
        data_parallel_size=replicas,
        tensor_parallel_size=split,
        process_group_backend="gloo",
        save_distributed_checkpoint=False,
    )


def train(
    rank: int,
    world: int,
    front: str,
    split: int,
    optimizer: str = "sgd",
    clip: float | None = None,
) -> Tensor:
    replicas = world // split
    module = ShardedModule(dtype=torch.float64, optimizer=optimizer)
    callbacks = [AccumulationCallback(PerToken())] if front == "callback" else []
    trainer(
        WINDOW,
        strategy=mesh_strategy(replicas, split),
        devices=world,
        use_distributed_sampler=False,
        callbacks=callbacks,
        gradient_clip_val=clip,
    ).fit(module, rank_loader(DATA, BATCH, rank // split, replicas))
    return whole(module)


OPTIONS = [(optimizer, clip) for optimizer in ("sgd", "adamw") for clip in (None, 0.05)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """What two ranks end with in each case, and where they have saved."""
    path = str(tmp_path_factory.mktemp("sharded") / "inside.ckpt")
    save = {"path": path, "after": INSIDE}
    cases: dict[Any, Case] = {how: (train, "callback", 1, *how) for how in OPTIONS}
    cases |= {
        "plain": (train, "plain", 1),
        "tensor parallel": (train, "callback", 2),
        "half auto": (train_half_sharded, "auto"),
        "half mean": (train_half_sharded, "mean"),
        "saved": (train_and_save, None, save, 0),
        "resumed": (train_and_save, path, None, INSIDE),
    }
    return run_cases(2, cases) | {"path": path}


def deviations(
    ends: list[Any], replicas: int, optimizer: str = "sgd", clip: float | None = None
) -> list[float]:
    start, reference = (
        TokenModule(dtype=torch.float64, optimizer=optimizer) for _ in range(2)
    )
    windows = windows_over_ranks(DATA, BATCH, WINDOW, replicas)
    train_on_windows(reference, windows, clip=clip)
    return [deviation(end, reference, start) for end in raise_rank_errors(ends)]


@pytest.mark.parametrize(("optimizer", "clip"), OPTIONS)
def test_fsdp2_equals_one_process(two: Any, optimizer: str, clip: float | None) -> None:
    assert max(deviations(two[optimizer, clip], 2, optimizer, clip)) <= EXACT


def test_plain_fsdp2_does_not_equal_one_process(two: Any) -> None:
    assert min(deviations(two["plain"], 2)) > NAIVE


def test_tensor_parallel_ranks_equal_one_process(two: Any) -> None:
    """verl#6609: two ranks share one window's data, and count it once."""
    assert max(deviations(two["tensor parallel"], 1)) <= EXACT


def test_replicas_of_tensor_parallel_ranks_equal_one_process() -> None:
    """World size means data-parallel replicas: four ranks, two of them."""
    assert max(deviations(run_ranks(train, 4, "callback", 2), 2)) <= EXACT


class HalfSharded(ShardedModule):
    """The embedding is sharded; the head's gradients stay each rank's own."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        fully_shard(self.net.embed, mesh=self.device_mesh["data_parallel"])


def train_half_sharded(rank: int, world: int, aggregation: Any) -> Tensor:
    module = HalfSharded(dtype=torch.float64)
    trainer(
        WINDOW,
        strategy=mesh_strategy(world, 1),
        devices=world,
        use_distributed_sampler=False,
        callbacks=[AccumulationCallback(PerToken(), aggregation=aggregation)],
    ).fit(module, rank_loader(DATA, BATCH, rank, world))
    return whole(module)


def test_parameters_that_no_backend_averages_are_refused(two: Any) -> None:
    for error in two["half auto"]:
        assert "aggregation='auto': net.head.weight is not sharded" in str(error)
    ends = raise_rank_errors(two["half mean"])
    assert not torch.equal(*ends)  # why


# ---- checkpoints ---------------------------------------------------------------------


def train_and_save(
    rank: int,
    world: int,
    resume: str | None,
    save: dict[str, Any] | None,
    skip: int,
) -> Tensor:
    module = ShardedModule(dtype=torch.float64, optimizer="adamw")
    callbacks = [AccumulationCallback(PerToken()), *([Save(**save)] if save else [])]
    trainer(
        LONG_WINDOW,
        strategy=mesh_strategy(world, 1) if world > 1 else "auto",
        devices=world,
        max_epochs=1,
        use_distributed_sampler=False,
        callbacks=callbacks,
    ).fit(module, FromBatch(rank, world, skip), ckpt_path=resume)
    return whole(module)


def test_resume_inside_a_window_of_fsdp2_equals_the_big_batch(two: Any) -> None:
    assert off_long_windows(two["saved"]) <= EXACT
    assert off_long_windows(two["resumed"]) <= EXACT


@pytest.mark.filterwarnings("ignore:checkpoint. it was taken inside a window")
@pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended")
def test_resume_inside_a_window_of_fsdp2_on_one_rank_equals_the_big_batch(
    two: Any,
) -> None:
    assert off_long_windows([train_and_save(0, 1, two["path"], None, INSIDE)]) <= EXACT


# ---- FSDP1 ---------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="FSDP1 needs a GPU")
def test_fsdp1_equals_one_process() -> None:
    module, reference, start = (TokenModule() for _ in range(3))
    data = ragged_sequences(38)
    train_on_windows(reference, windows_over_ranks(data, BATCH, WINDOW, 1))
    windows = AccumulationCallback(PerToken())
    fit = trainer(
        WINDOW,
        accelerator="gpu",
        strategy=FSDPStrategy(state_dict_type="full"),
        callbacks=[windows, WindowMonitor(1)],
    )
    fit.fit(module, rank_loader(data, BATCH, 0, 1))
    state = fit.strategy.lightning_module_state_dict()
    trained = torch.cat([p.double().flatten().cpu() for p in state.values()])
    assert deviation(trained, reference, start) <= TOLERANCE[torch.float32]
    assert windows.last_window is not None
