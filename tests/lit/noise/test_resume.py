"""What NoiseScale saves in a checkpoint, and resumes from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.helpers import TokenModule, pad, ragged_sequences, trainer
from tests.lit.fronts import RAGGED
from tests.lit.noise.keep import KeepTable
from trainkit import AccumulationCallback, NoiseScale, PerToken, ResumableLoader

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


@pytest.mark.parametrize(("batch", "open_one"), [(11, 3), (13, 9), (14, 4), (19, 9)])
def test_a_resumed_run_has_the_same_sums_to_the_bit(
    batch: int, open_one: int, tmp_path: Path
) -> None:
    """But for the window in which it was saved."""
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
        tables.append(kept.table)
    straight, resumed = tables
    assert len(straight) == 9
    assert torch.equal(resumed, straight[[n for n in range(9) if n != open_one]])


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
        tables.append(kept.table)
    assert torch.equal(*tables)
