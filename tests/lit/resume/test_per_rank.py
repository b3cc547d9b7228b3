"""Random numbers and sums of an epoch, saved for each rank."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from tests.helpers import quiet_lightning, raise_rank_errors, run_ranks
from tests.lit.resume.interrupting import (
    KillAt,
    ask,
    close,
    differing,
    interrupted,
    rows,
    train,
    unlike,
)
from trainkit.core.generators import read_states, write_states
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


def test_a_rank_that_was_not_there_is_spoken_of() -> None:
    """A checkpoint without states changes nothing."""
    each, module, before = RandomState(), SimpleNamespace(device=CPU), read_states(CPU)
    none = SimpleNamespace(flattened=[])
    loop = SimpleNamespace(restarting=False, _combined_loader=none)
    fit: Any = {"state": SimpleNamespace(fn="fit"), "fit_loop": loop}
    trainer = SimpleNamespace(global_rank=1, **fit)
    for states in ([], [before]):
        each.on_load_checkpoint(
            trainer, None, {RandomState.KEY: states} if states else {}
        )
        if states:
            with pytest.warns(UserWarning, match="of 1 ranks, but not of rank 1"):
                each.on_train_start(trainer, module)
        else:
            each.on_train_start(trainer, module)
        assert differing(before, read_states(CPU)) == []


def test_sums_that_cannot_go_on_are_spoken_of(monkeypatch: pytest.MonkeyPatch) -> None:
    each, trainer = EpochSums(), SimpleNamespace()
    monkeypatch.setattr(
        "trainkit.lit.resume.per_rank.add_callback_metrics", lambda *args: None
    )
    monkeypatch.setattr("trainkit.lit.resume._compat.epoch_sums", lambda trainer: {})
    one = {"value": torch.tensor(1.0)}
    each._before = {"training_step.accuracy": [None], "training_step.x": [one]}
    with pytest.warns(UserWarning, match="metric objects of training_step.accuracy"):
        each.on_train_start(trainer, None)
    with pytest.warns(UserWarning, match="training_step.x was logged before the run"):
        each.on_train_epoch_end(trainer, None)


def test_sums_of_ranks_that_are_no_more_are_added(tmp_path: Path) -> None:
    """As if another rank had logged what this one had."""
    ends: list[tuple[float, float, float]] = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        with quiet_lightning(), pytest.raises(SystemExit):
            train(folder, kill=ask("on_train_batch_end", 5))
        path = folder / "checkpoints" / "last.ckpt"
        checkpoint = torch.load(path, weights_only=True)
        (sums,) = checkpoint[EpochSums.KEY][0]["sums"]["training_step.train/mean"]
        checkpoint[EpochSums.KEY] *= number
        torch.save(checkpoint, path)
        with quiet_lightning():
            train(folder, resume=True)
        means = [row["train/mean"] for row in rows(folder) if row.get("train/mean")]
        ends.append((float(means[0]), float(sums["value"]), float(sums["weight"])))
    (one, value, weight), (two, *_) = ends
    assert two == pytest.approx((one * 26 + value) / (26 + weight), rel=1e-6)
    assert two != pytest.approx(one, rel=1e-4)


def _rank(rank: int, world_size: int, folder: str) -> Any:
    ddp: dict[str, Any] = {"strategy": "ddp", "devices": world_size}
    how = {**ddp, "limit_val_batches": 0, "seed": 7 + rank}  # each draws others
    path = Path(folder)
    whole = train(path / "whole", **how)
    found = interrupted(path / "killed", KillAt("on_train_batch_start", 4), **how)
    folders = path / "whole", path / "killed"
    return unlike(whole, found), [] if rank else close(*map(rows, folders))


@pytest.mark.slow
def test_ranks_go_on_exactly(tmp_path: Path) -> None:
    with quiet_lightning():
        found = raise_rank_errors(run_ranks(_rank, 2, str(tmp_path)))
    assert found == [([], []), ([], [])]
