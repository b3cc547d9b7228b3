"""Random numbers and sums of an epoch, saved for each rank."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.helpers import quiet_lightning, raise_rank_errors, run_ranks
from tests.lit.resume.interrupting import (
    KillAt,
    Killed,
    close,
    differing,
    rows,
    state_of,
    train,
)
from trainkit.core.generators import read_states, write_states
from trainkit.lit.logs.metric_rows import _cut
from trainkit.lit.logs.metrics_csv import MetricsCSVLogger
from trainkit.lit.resume.per_rank import EpochSums, RandomState

CPU = torch.device("cpu")


def draw() -> list[Any]:
    return [random.random(), random.gauss(0, 1), numpy.random.rand(), torch.rand(2)]


def test_states_go_through_a_file_that_nobody_must_trust(tmp_path: Path) -> None:
    random.gauss(0, 1)  # leaves a second one behind
    numpy.random.randn()
    torch.save(read_states(CPU), tmp_path / "states")
    expected = draw()
    write_states(torch.load(tmp_path / "states", weights_only=True), CPU)
    assert differing(expected, draw()) == []
    assert differing(expected, draw()) != []


class FakeTrainer:
    world_size, global_rank, interrupted = 1, 0, False

    class state:
        fn = "fit"

    class fit_loop:
        restarting = False


def test_rank_that_was_not_there_is_spoken_of() -> None:
    each, trainer = RandomState(), FakeTrainer()
    each.on_load_checkpoint(trainer, None, {RandomState.KEY: [read_states(CPU)]})
    trainer.global_rank = 1
    module: Any = torch.nn.Module()
    module.device = CPU
    with pytest.warns(UserWarning, match="generators of 1 ranks, but not of rank 1"):
        each.on_train_start(trainer, module)


def test_checkpoint_without_states_changes_nothing() -> None:
    each, before = RandomState(), torch.get_rng_state()
    each.on_load_checkpoint(FakeTrainer(), None, {})
    each.on_train_start(FakeTrainer(), None)
    assert torch.equal(before, torch.get_rng_state())


def test_metric_objects_are_spoken_of(monkeypatch: pytest.MonkeyPatch) -> None:
    each = EpochSums()
    each._before = {"training_step.accuracy": [None]}
    monkeypatch.setattr("trainkit.lit._compat.add_callback_metrics", lambda *args: None)
    with pytest.warns(UserWarning, match="metric objects of training_step.accuracy"):
        each.on_train_start(FakeTrainer(), None)
    assert each._before == {}


def test_sum_that_is_not_logged_again_is_spoken_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    each = EpochSums()
    each._before = {"training_step.x": [{"value": torch.tensor(1.0)}]}
    monkeypatch.setattr("trainkit.lit._compat.epoch_sums", lambda trainer: {})
    with pytest.warns(UserWarning, match="training_step.x was logged before the run"):
        each.on_train_epoch_end(FakeTrainer(), None)


def test_rows_that_are_not_there_are_spoken_of(tmp_path: Path) -> None:
    logger = MetricsCSVLogger(tmp_path)
    logger.log_metrics({"a": 1.0}, step=0)
    with pytest.warns(UserWarning, match="has 1 of the 3 rows that the checkpoint"):
        _cut(logger, 3)
    assert [row["step"] for row in logger.rows()] == ["0"]


# ---- several ranks -------------------------------------------------------------------


def _rank(rank: int, world_size: int, folder: str) -> Any:
    how: dict[str, Any] = {
        "strategy": "ddp",
        "devices": world_size,
        "limit_val_batches": 0,
        "seed": 7 + rank,  # each draws other numbers
    }
    path = Path(folder)
    whole = state_of(*train(path / "whole", **how))
    try:
        train(path / "killed", kill=KillAt("on_train_batch_start", 4), **how)
    except Killed:
        pass
    found = state_of(*train(path / "killed", resume=True, **how))
    if rank:
        return differing(whole, found), []
    return differing(whole, found), close(rows(path / "whole"), rows(path / "killed"))


@pytest.mark.slow
def test_ranks_go_on_exactly(tmp_path: Path) -> None:
    with quiet_lightning():
        found = raise_rank_errors(run_ranks(_rank, 2, str(tmp_path)))
    assert found == [([], []), ([], [])]
