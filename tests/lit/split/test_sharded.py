"""Where forward passes communicate, all ranks run as many micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from tests.helpers import deviation, pad, raise_rank_errors, run_ranks, trainer
from tests.lit.fronts import cut as parted
from tests.lit.fronts import windows_of
from tests.lit.split.rank_cases import SHARES, Case, Trained, data_of, reference
from tests.lit.windows.test_sharded import mesh_strategy, whole
from trainkit import WindowMonitor
from trainkit.core.ranks import Ranks
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.lit.split.refusals import communicates_in_forward

EXACT = 1e-9
CASES = {
    "tokens": Case(cut=MicroBatching(tokens=40)),
    "single rows": Case(cut=MicroBatching(size=1)),
    "terms": Case(loss="terms"),
    "windows of two": Case(window=2, epochs=2),
    "sums, windows of two": Case(window=2, loss="sums", cut=MicroBatching(size=1)),
    "auto": Case(cut=MicroBatching("auto")),
}


class Sharded(Trained):
    """Counts what it is shown."""

    def __init__(self, case: Case) -> None:
        super().__init__(case, None)
        self.rows, self.counted, self.num_steps = SumMetric(), SumMetric(), 0
        self.cast = nn.BatchNorm1d(1)  # buffers that only a forward pass changes
        for parameter in self.cast.parameters():
            parameter.requires_grad_(False)

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        if not any(isinstance(p, DTensor) for p in self.parameters()):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = len(batch["ids"])
        self.num_steps += 1
        self.rows.update(rows)
        self.counted(float(rows))
        self.log("rows", float(rows), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("counted", self.counted, on_step=False, on_epoch=True)
        split: Any = windows_of(self.trainer).split
        current = split.current
        fills_up = float(current.is_filler)
        self.log_exact("filling", torch.tensor(fills_up), batch, weight=rows)
        self.cast(torch.ones(rows + 1, 1))
        return super().training_step(batch, batch_idx)


@dataclass
class Seen:
    weights: Tensor
    steps: int
    error: str
    rows: float = 0
    num_steps: int = 0
    samples: list[float] = field(default_factory=list)
    logged: dict[str, float] = field(default_factory=dict)
    num_batches_tracked: int = 0


class Samples(WindowMonitor):
    def __init__(self) -> None:
        super().__init__(1)
        self.found: list[float] = []

    def on_before_optimizer_step(
        self, trainer: Any, pl_module: Any, optimizer: Any
    ) -> None:
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        stats = windows_of(trainer).last_window
        assert stats is not None
        self.found.append(float(stats.samples))


def train_sharded(rank: int, world: int, cases: dict[str, Case]) -> dict[str, Seen]:
    return {name: _train(rank, world, case) for name, case in cases.items()}


def _train(rank: int, world: int, case: Case) -> Seen:
    module, samples = Sharded(case), Samples()
    fit = trainer(
        case.window,
        strategy=mesh_strategy(world, 1),
        devices=world,
        max_epochs=case.epochs,
        use_distributed_sampler=False,
        callbacks=[samples],
    )
    data = data_of(case, world)[rank]
    loader: Any = DataLoader(
        data,  # type: ignore[arg-type]
        batch_sampler=parted(data, SHARES[world][rank]),
        collate_fn=pad,
    )
    try:
        fit.fit(module, loader)
    except Exception as error:
        return Seen(torch.empty(0), fit.global_step, f"{type(error).__name__}: {error}")
    tracked = module.cast.num_batches_tracked
    assert tracked is not None
    return Seen(
        whole(module.net),
        fit.global_step,
        "",
        float(module.rows.compute()),
        module.num_steps,
        samples.found,
        {name: float(value) for name, value in fit.callback_metrics.items()},
        int(tracked),
    )


Results = list[dict[str, Seen]]


@pytest.fixture(scope="module")
def two_ranks() -> Results:
    return raise_rank_errors(run_ranks(train_sharded, 2, CASES))


TRAINED = [name for name in CASES if name != "auto"]


@pytest.mark.parametrize("name", TRAINED)
def test_fsdp2_equals_one_process(name: str, two_ranks: Results) -> None:
    """3 micro-batches against 1, and where a rank has not so many rows."""
    start, end = reference(CASES[name], 2)
    for result in (rank[name] for rank in two_ranks):
        assert result.error == ""
        assert deviation(result.weights, end, start) <= EXACT


@pytest.mark.parametrize("name", TRAINED)
def test_what_only_fills_up_counts_nowhere(name: str, two_ranks: Results) -> None:
    shares, epochs = SHARES[2], CASES[name].epochs
    for rank, result in enumerate(each[name] for each in two_ranks):
        assert result.rows == epochs * sum(map(sum, shares))  # a metric adds up ranks
        assert result.num_steps == result.num_batches_tracked
        assert sum(result.samples) == epochs * sum(map(sum, shares))
        assert result.logged["counted"] == sum(map(sum, shares))
        assert result.logged["filling"] == 0.0
        assert result.logged["rows"] == sum(shares[rank])


def test_ranks_that_have_fewer_rows_have_fewer_counting_micro_batches(
    two_ranks: Results,
) -> None:
    """Single rows: 26 against 16 in an epoch, and as many forward passes."""
    counted = [rank["single rows"].num_steps for rank in two_ranks]
    assert counted == [sum(share) for share in SHARES[2]]


def test_a_size_cannot_be_tried_there(two_ranks: Results) -> None:
    for result in (rank["auto"] for rank in two_ranks):
        assert "ModelParallelStrategy forward passes communicate" in result.error
        assert result.steps == 0


def test_layers_that_speak_to_other_ranks_are_seen() -> None:
    """torch runs SyncBatchNorm on GPUs alone."""
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    several = Ranks("mean", None, 2, 0, None)
    assert not communicates_in_forward(plain, several)
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(plain)
    assert communicates_in_forward(synced, several)
    assert not communicates_in_forward(synced, Ranks())
