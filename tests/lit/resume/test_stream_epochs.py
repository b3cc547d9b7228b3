"""A stream whose order is that of an epoch goes on in the order of the right one."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import IterableDataset

from tests.helpers import trainer
from trainkit import AccumulationMixin, PerSample, ResumableStream

pytestmark = pytest.mark.filterwarnings("ignore:.*exists and is not empty")


class Ordered(IterableDataset[Any]):
    """Numbers in the order of an epoch, and a place that a state holds. Where that is
    the end, nothing follows in the pass that goes on, as of a Hugging Face stream."""

    epoch = place = 0
    goes_on = False

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        draw = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(8, generator=draw).double()
        self.place, self.goes_on = self.place if self.goes_on else 0, False
        while self.place < 8:
            self.place += 1
            yield order[self.place - 1]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place, self.goes_on = state["place"], True


class Line(AccumulationMixin, pl.LightningModule):
    accumulation = PerSample()

    def __init__(self) -> None:
        super().__init__()
        self.slope = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.read: list[tuple[int, list[float]]] = []

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.read.append((self.current_epoch, batch.tolist()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return ((self.slope - 0.1) * batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize("every", [None, 4])
@pytest.mark.parametrize("workers", [0, 1])
def test_the_order_of_an_epoch_is_that_of_the_resumed_one(
    every: int | None, workers: int, tmp_path: Path
) -> None:
    """Lightning reads before it tells the epoch; a checkpoint was written at the end of
    one, or with its last batch, after which the stream has ended."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def trained(epochs: int, ckpt_path: Any = None) -> Line:
        kept = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=every)
        how: Any = {"max_epochs": epochs, "enable_checkpointing": True}
        each = trainer(1, callbacks=[kept], **how)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")
            loader = torchdata.StatefulDataLoader(Ordered(), 2, num_workers=workers)
        module = Line()
        each.fit(module, ResumableStream(loader), ckpt_path=ckpt_path)
        return module

    trained(1)
    (tmp_path / "last.ckpt").rename(tmp_path / "first.ckpt")
    resumed, whole = trained(3, tmp_path / "first.ckpt"), trained(3)
    assert resumed.read == whole.read[4:]
    assert torch.equal(resumed.slope, whole.slope)
