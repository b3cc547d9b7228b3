"""Sharded parameters train what one process with the big batch trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from tests.helpers import (
    NAIVE,
    TOLERANCE,
    TokenModule,
    deviation,
    ragged_sequences,
    raise_rank_errors,
    rank_loader,
    run_cases,
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
from tests.lit.windows.rank_cases import BATCH, DATA, WINDOW, deviations
from tests.zoo.modules import Plain, Sharded, on_front, whole
from trainkit import WindowMonitor

EXACT = TOLERANCE[torch.float64]
OPTIONS = [(optimizer, clip) for optimizer in ("sgd", "adamw") for clip in (None, 0.05)]


class HalfSharded(Sharded):
    """The embedding is sharded; the head's gradients stay each rank's own."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        fully_shard(self.net.embed, mesh=self.device_mesh["data_parallel"])


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
    split: int = 1,
    made: dict[str, Any] | None = None,
    clip: float | None = None,
    kind: Any = Sharded,
) -> Tensor:
    """Groups of `split` ranks share their data and the head."""
    module, ours = on_front(front, kind, **made or {})
    how: dict[str, Any] = {"strategy": mesh_strategy(world // split, split)}
    how |= {"devices": world, "callbacks": ours, "gradient_clip_val": clip}
    fitted = trainer(WINDOW, use_distributed_sampler=False, **how)
    fitted.fit(module, rank_loader(DATA, BATCH, rank // split, world // split))
    return whole(module)


def train_and_save(
    rank: int, world: int, resume: str | None, save: dict[str, Any] | None, skip: int
) -> Tensor:
    """One epoch of long windows, saved in one of them or resumed there."""
    module, ours = on_front("callback", Sharded, optimizer="adamw")
    callbacks = [*ours, *([Save(**save)] if save else [])]
    how: dict[str, Any] = {"strategy": mesh_strategy(2, 1)} if world > 1 else {}
    how |= {"devices": world, "callbacks": callbacks, "max_epochs": 1}
    fitted = trainer(LONG_WINDOW, use_distributed_sampler=False, **how)
    fitted.fit(module, FromBatch(rank, world, skip), ckpt_path=resume)
    return whole(module)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """What two ranks end with in each case, and where they have saved."""
    path = str(tmp_path_factory.mktemp("sharded") / "inside.ckpt")
    save = {"path": path, "after": INSIDE}
    mean = {"options": {"aggregation": "mean"}}
    cases: dict[Any, Any] = {
        (optimizer, clip): (train, "callback", 1, {"optimizer": optimizer}, clip)
        for optimizer, clip in OPTIONS
    }
    cases |= {
        "plain": (train, "plain"),
        "tensor parallel": (train, "callback", 2),
        "half auto": (train, "callback", 1, {}, None, HalfSharded),
        "half mean": (train, "callback", 1, mean, None, HalfSharded),
        "saved": (train_and_save, None, save, 0),
        "resumed": (train_and_save, path, None, INSIDE),
    }
    return run_cases(2, cases) | {"path": path}


@pytest.mark.parametrize(("optimizer", "clip"), OPTIONS)
def test_fsdp2_equals_one_process(two: Any, optimizer: str, clip: float | None) -> None:
    """Without trainkit it does not."""
    assert max(deviations(two[optimizer, clip], DATA, optimizer, clip)) <= EXACT
    assert min(deviations(two["plain"])) > NAIVE


def test_tensor_parallel_ranks_equal_one_process(two: Any) -> None:
    """verl#6609: two ranks share one window's data, and count it once. World size
    means data-parallel replicas: of four ranks, two."""
    assert max(deviations(two["tensor parallel"], replicas=1)) <= EXACT
    four = run_ranks(train, 4, "callback", 2)
    assert max(deviations(four, replicas=2)) <= EXACT


def test_parameters_that_no_backend_averages_are_refused(two: Any) -> None:
    for error in two["half auto"]:
        assert "aggregation='auto': net.head.weight is not sharded" in str(error)
    ends = raise_rank_errors(two["half mean"])
    assert not torch.equal(*ends)  # why


@pytest.mark.filterwarnings("ignore:checkpoint. it was taken inside a window")
@pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended")
def test_resume_inside_a_window_of_fsdp2_equals_the_big_batch(two: Any) -> None:
    """On two ranks, and on one."""
    assert off_long_windows(two["saved"]) <= EXACT
    assert off_long_windows(two["resumed"]) <= EXACT
    assert off_long_windows([train_and_save(0, 1, two["path"], None, INSIDE)]) <= EXACT


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="FSDP1 needs a GPU")
def test_fsdp1_equals_one_process() -> None:
    reference, start = TokenModule(), TokenModule()
    data = ragged_sequences(38)
    train_on_windows(reference, windows_over_ranks(data, BATCH, WINDOW, 1))
    module, (windows,) = on_front("callback", Plain, dtype=torch.float32)
    how: dict[str, Any] = {"strategy": FSDPStrategy(state_dict_type="full")}
    how |= {"accelerator": "gpu", "callbacks": [windows, WindowMonitor(1)]}
    fitted = trainer(WINDOW, **how)
    fitted.fit(module, rank_loader(data, BATCH, 0, 1))
    state = fitted.strategy.lightning_module_state_dict()
    trained = torch.cat([p.double().flatten().cpu() for p in state.values()])
    assert deviation(trained, reference, start) <= TOLERANCE[torch.float32]
    assert windows.last_window is not None
