"""`log_exact` in an interrupted training: the mean is that of the whole epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.helpers import (
    TokenModule,
    quiet_lightning,
    raise_rank_errors,
    run_ranks,
    trainer,
)
from tests.lit.logs.test_exact_log import near, one_batch
from tests.lit.resume.interrupting import (
    Exactly,
    KillAt,
    ask,
    close,
    differing,
    interrupted,
    rows,
    state_of,
    train,
)
from tests.lit.resume.resuming import SEQUENCES, Resumable, Saving, strip
from tests.lit.resume.test_rank_checkpoints import DATA, NUM_BATCHES, FromBatch, Save
from trainkit import AccumulationMixin, PerToken
from trainkit.lit.logs.exact_log import KEY
from trainkit.lit.logs.metrics_csv import Row

pytestmark = pytest.mark.filterwarnings(
    "ignore:accumulation. an open window:UserWarning"
)

HOOKS = ["on_after_backward", "on_train_batch_end", "on_validation_end"]


class Means(pl.Callback):
    """The exact mean of the epoch that ended last."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.found.append(float(trainer.callback_metrics["train/exact"]))


class Still(AccumulationMixin, TokenModule):
    """Learns nothing, so that the losses of an epoch are of one model."""

    accumulation = PerToken()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log_exact("train/exact", loss.detach(), batch)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.fixture(autouse=True)
def quiet(capsys: pytest.CaptureFixture[str]) -> Any:
    with quiet_lightning():
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("whole")
    with quiet_lightning():
        return state_of(*train(folder, kind=Exactly)), rows(folder)


def exact(found: list[Row]) -> list[tuple[str, str]]:
    """The exact means of each epoch, to the last bit."""
    return [
        (row["train/exact"], row["train/first"])
        for row in found
        if row.get("train/exact")
    ]


# ---- interrupted and gone on ---------------------------------------------------------


def test_exact_means_of_a_whole_run(whole: Any) -> None:
    found = exact(whole[1])
    assert len(found) == 2
    assert all(mean != first for mean, first in found)


@pytest.mark.parametrize(
    ("batch", "dies"),
    [
        (1, "killed"),
        (3, "stopped"),
        (6, "killed"),
        (8, "stopped"),
        (8, "killed"),
        (10, "stopped"),
    ],
)
def test_interrupted_run_logs_the_same_exact_means(
    whole: Any, tmp_path: Path, batch: int, dies: str
) -> None:
    """The hooks take turns, so that each of them dies in both ways."""
    hook = HOOKS[(batch + (dies == "killed")) % len(HOOKS)]
    kill = KillAt(hook, batch) if dies == "killed" else ask(hook, batch)
    found = interrupted(tmp_path, kill, kind=Exactly)
    assert kill.has_died
    assert differing(whole[0], state_of(*found)) == []
    assert close(whole[1], rows(tmp_path)) == []
    assert exact(whole[1]) == exact(rows(tmp_path))


# ---- a checkpoint of any moment ------------------------------------------------------


def resumed(path: Path, *, window: int = 4, replay: int = 0) -> float:
    means = Means()
    fit = trainer(window, max_epochs=1, callbacks=[means])
    fit.fit(
        Still(dtype=torch.float64), Resumable(replay), ckpt_path=path, weights_only=True
    )
    return means.found[0]


@pytest.mark.parametrize(
    ("hook", "at"),
    [
        *(("on_train_batch_start", at) for at in (0, 4, 8, 9)),
        *(("on_train_batch_end", at) for at in (0, 3, 6, 8)),
    ],
)
def test_resumed_epoch_has_the_mean_of_all_its_batches(
    tmp_path: Path, hook: str, at: int
) -> None:
    path = tmp_path / "inside.ckpt"
    fit = trainer(4, max_epochs=1, callbacks=[Saving(path, at, hook)])
    fit.fit(Still(dtype=torch.float64), Resumable())
    replay = int(hook == "on_train_batch_start")  # the loader has given that one too
    assert resumed(path, replay=replay) == near(one_batch(SEQUENCES))


@pytest.mark.parametrize("at", [0, 4, 9])
def test_batch_that_is_run_again_counts_once(tmp_path: Path, at: int) -> None:
    """It was logged already, and was under way when the checkpoint was made."""
    path = tmp_path / "torn.ckpt"
    saver = Saving(path, at, "on_before_backward")
    fit = trainer(max_epochs=1, callbacks=[saver])
    fit.fit(Still(dtype=torch.float64), Resumable())
    assert resumed(path, window=1, replay=1) == near(one_batch(SEQUENCES))


def test_checkpoint_without_the_totals_is_said(tmp_path: Path) -> None:
    """Negative control: the mean is then that of the rest."""
    path = tmp_path / "inside.ckpt"
    fit = trainer(4, max_epochs=1, callbacks=[Saving(path, 3)])
    fit.fit(Still(dtype=torch.float64), Resumable())
    strip(path, KEY)
    with pytest.warns(UserWarning, match=r"log_exact: .* for train/exact, so the mean"):
        assert resumed(path) != pytest.approx(one_batch(SEQUENCES), rel=1e-3)


# ---- several ranks -------------------------------------------------------------------


def saved_and_resumed(rank: int, world: int, path: str) -> tuple[float, float]:
    return (
        mean_on_ranks(rank, world, path, False),
        mean_on_ranks(rank, world, path, True, 6),
    )


def mean_on_ranks(
    rank: int, world: int, path: str, resume: bool, skip: int = 0
) -> float:
    means = Means()
    fit = trainer(
        4,
        strategy="ddp" if world > 1 else "auto",
        devices=world,
        max_epochs=1,
        use_distributed_sampler=False,
        callbacks=[means, *([] if resume else [Save(path, after=6)])],
    )
    module = Still(dtype=torch.float64)
    fit.fit(module, FromBatch(rank, world, skip), ckpt_path=path if resume else None)
    return means.found[0]


def test_epoch_resumed_on_as_many_ranks_or_on_one(tmp_path: Path) -> None:
    assert NUM_BATCHES > 6
    path = str(tmp_path / "inside.ckpt")
    expected = near(one_batch(DATA))
    found = raise_rank_errors(run_ranks(saved_and_resumed, 2, path))
    assert found == [(expected, expected)] * 2
    assert raise_rank_errors(run_ranks(mean_on_ranks, 1, path, True, 6)) == [expected]
