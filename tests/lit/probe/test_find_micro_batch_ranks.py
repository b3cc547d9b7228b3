"""Ranks try each size together, agree on it, and are left alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cli.training import SMALL
from tests.helpers import RankError, raise_rank_errors, run_cases, run_ranks, weights
from tests.lit.probe.finding import Data, Limited, Net, exact, found, quick
from tests.startup import forked

WORLD = 2


class OneLimited(Limited):
    """Only the last rank has little memory."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_rank != WORLD - 1:
            return Net.training_step(self, batch, batch_idx)
        return super().training_step(batch, batch_idx)


def one_limited(rows: int, where: str) -> OneLimited:
    options = {"limit": rows, "where": where, "seen": []}
    return type("OneLimited", (OneLimited,), options)()


def fitted(
    where: str, by_hand: tuple[int, int] | None = None
) -> tuple[int, int, Tensor, int]:
    """One rank's part: the sizes, the weights after a fit, the steps."""
    torch.manual_seed(3)
    fit = quick(strategy="ddp", devices=WORLD, callbacks=[exact()], max_epochs=1)
    module, data = one_limited(5, where), Data(4)
    if by_hand is not None:
        data.batch_size, fit.accumulate_grad_batches = by_hand
    else:
        found(module, data, fit, target=32)
    fit.fit(module, data)
    sizes = data.batch_size, fit.accumulate_grad_batches
    return *sizes, weights(module), fit.global_step


def finds_then_by_hand(rank: int, world: int, where: str) -> Any:
    first = fitted(where)
    return first, fitted(where, by_hand=(4, 4))


@pytest.fixture(scope="module")
def ends() -> dict[Any, list[Any]]:
    """What the ranks end with, where all of them fail or none."""
    places = {w: (finds_then_by_hand, w) for w in ("forward", "backward")}
    refused = {each: (each,) for each in (static, synchronised, sharded)}
    return run_cases(WORLD, {**places, **refused})


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_one_rank_that_runs_out_decides_for_all(ends: Any, where: str) -> None:
    """In the backward pass its gradients would meet the other's in one bucket."""
    results = raise_rank_errors(ends[where])
    for (size, accumulate, after, steps), by_hand in results:
        assert (size, accumulate) == (4, 4), "4 x 4 x 2 ranks are the target"
        assert torch.equal(after, by_hand[2])
        assert steps == by_hand[3] == 3
    assert torch.equal(results[0][0][2], results[1][0][2])


def fails_on_one(rank: int, world: int) -> Any:
    class Mistaken(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if rank == 1:
                raise KeyError("labels")
            return super().training_step(batch, batch_idx)

    found(Mistaken(), Data(4), quick(strategy="ddp", devices=WORLD))


def test_another_error_on_one_rank_ends_all_of_them() -> None:
    first, second = run_ranks(fails_on_one, WORLD)
    assert isinstance(first, RankError)
    assert "another rank failed" in str(first)
    assert "KeyError: 'labels'" in str(second)


def synchronised(rank: int, world: int) -> Any:
    class Batched(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net[1] = torch.nn.SyncBatchNorm(8).double()

    found(Batched(), Data(4), quick(strategy="ddp", devices=WORLD))


def sharded(rank: int, world: int) -> Any:
    from lightning.pytorch.strategies import ModelParallelStrategy

    found(Net(), Data(4), quick(strategy=ModelParallelStrategy(), devices=WORLD))


def static(rank: int, world: int) -> Any:
    from lightning.pytorch.strategies import DDPStrategy

    strategy = DDPStrategy(static_graph=True)
    found(Net(), Data(4), quick(strategy=strategy, devices=WORLD))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (static, "on 2 ranks DDP with static_graph=True communicates"),
        (synchronised, "SyncBatchNorm communicates within a pass"),
        (sharded, "on 2 ranks ModelParallelStrategy communicates"),
    ],
)
def test_a_pass_that_communicates_is_refused(
    ends: Any, function: Any, words: str
) -> None:
    for result in ends[function]:
        assert words in str(result)


@pytest.mark.slow
def test_the_command_starts_its_ranks_and_one_speaks(tmp_path: Path) -> None:
    words = [
        *("plan", "--probe", "--json", "--target", "16", "--max-micro-batch", "4"),
        *("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"),
        *("trainer.precision=32-true", *SMALL),
    ]
    keep = {n: v for n, v in os.environ.items() if not n.startswith("WANDB")}
    done = subprocess.run(
        [sys.executable, "-m", "trainkit", *words],
        capture_output=True,
        cwd=tmp_path,
        env={**keep, "HOME": str(tmp_path), **forked()},
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["world_size"], found["effective"]) == (2, 16)
    assert found["micro_batch"] <= 4
