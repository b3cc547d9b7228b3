"""What NoiseScale saves in a checkpoint, and resumes from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerStatus

from tests.helpers import TokenModule, pad, ragged_sequences, trainer
from tests.lit.fronts import RAGGED
from tests.lit.noise.keep import KeepTable
from trainkit import AccumulationCallback, NoiseScale, PerToken, ResumableLoader
from trainkit.lit.noise.callback import KEY

DATA = ragged_sequences(sum(RAGGED))

pytestmark = pytest.mark.filterwarnings("ignore:accumulation. an open window")


def rows(data: Any = DATA) -> ResumableLoader:
    return ResumableLoader(data, 4, shuffle=True, collate_fn=pad)


class Saver(pl.Callback):
    """Saves a checkpoint after a batch, mostly within a window."""

    def __init__(self, path: Path, batch: int) -> None:
        self.path, self.batch = path, batch

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.fit_loop.total_batch_idx == self.batch:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("batch", [11, 13, 14, 19])
def test_a_resumed_run_has_the_same_sums_to_the_bit(batch: int, tmp_path: Path) -> None:
    tables, saver = [], Saver(tmp_path / "in.ckpt", batch)
    for resumes in (False, True):
        noise = NoiseScale(1)
        kept = KeepTable(noise)
        callbacks = [kept, noise, AccumulationCallback(PerToken())]
        if not resumes:
            callbacks.append(saver)
        module = TokenModule(optimizer="adamw")
        trainer(4, callbacks=callbacks, max_epochs=3).fit(
            module,
            rows(),
            ckpt_path=saver.path if resumes else None,
        )
        assert kept.blocks is not None
        tables.append(kept.blocks)
    assert len(tables[0]) == 9
    assert torch.equal(*tables)


def test_a_checkpoint_that_was_validated_is_not_resumed(tmp_path: Path) -> None:
    class Validates(TokenModule):
        def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    saver = Saver(tmp_path / "in.ckpt", 14)
    own = AccumulationCallback(PerToken())
    trainer(4, callbacks=[saver, NoiseScale(1), own], max_epochs=3).fit(
        Validates(), rows(), rows()
    )
    tables = []
    for validates in (True, False):
        noise = NoiseScale(1)
        kept = KeepTable(noise)
        fit = trainer(4, callbacks=[kept, noise, own], max_epochs=1)
        if validates:
            fit.validate(Validates(), rows(), ckpt_path=saver.path, verbose=False)
        fit.fit(Validates(), rows(), rows())
        assert kept.blocks is not None
        tables.append(kept.blocks)
    assert torch.equal(*tables)


class SaveInside(pl.Callback):
    """Saves in the middle of a window, as if every rank, or one alone, could."""

    def __init__(self, noise: NoiseScale) -> None:
        self.noise, self.ranks = noise, []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        status = trainer.state.status
        for each in (status, TrainerStatus.INTERRUPTED):
            checkpoint: dict[str, Any] = {}
            trainer.state.status = each
            self.noise.on_save_checkpoint(trainer, pl_module, checkpoint)
            self.ranks.append(checkpoint[KEY]["rank"])
        trainer.state.status = status


def test_a_rank_that_was_interrupted_asks_no_other() -> None:
    noise = NoiseScale(1)
    saver = SaveInside(noise)
    callbacks = [saver, noise, AccumulationCallback(PerToken())]
    data = rows(DATA[:12])
    trainer(3, callbacks=callbacks).fit(TokenModule(), data)
    assert saver.ranks == [None, 0] * 6
