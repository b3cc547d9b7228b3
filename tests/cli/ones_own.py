"""A module and data that know nothing of trainkit."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from trainkit import TrainkitError

Batch = tuple[Tensor, Tensor]


def loader(seed: int, rows: int, sign: float = 1.0) -> DataLoader[Any]:
    draws = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 3, generator=draws, dtype=torch.get_default_dtype())
    return DataLoader(TensorDataset(inputs, sign * inputs.sin().sum(1)), batch_size=4)


class Bare(LightningModule):
    """With neither test_step nor predict_step."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(3, width), torch.nn.Tanh(), torch.nn.Linear(width, 1)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs).squeeze(-1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return (self(batch[0]) - batch[1]).square().mean()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Net(Bare):
    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("test/loss", self.training_step(batch, batch_idx))

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        return {"wanted": batch[1], "found": self(batch[0])}


class Unvalidated(Bare):
    """Has no validation, and logs its training."""

    validation_step = LightningModule.validation_step  # type: ignore[assignment]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", loss)
        return loss


class Late(Unvalidated):
    def on_train_epoch_end(self) -> None:
        self.log("val/late", 1.0)


class Nll(Net):
    """Calls what it logs by another name than most."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val/nll", self.training_step(batch, batch_idx))


class Quiet(Nll):
    """Logs nothing in the sanity check."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            super().validation_step(batch, batch_idx)


class Failing(Net):
    def test_step(self, batch: Batch, batch_idx: int) -> None:
        raise ZeroDivisionError("in test_step")


class Advised(Net):
    """Is advised in Python, as the library advises."""

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        raise TrainkitError("write PerSample(), and not Uniform()")


class OnlyTrain(LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader(0, 20)


class BareData(OnlyTrain):
    """With neither test_dataloader nor predict_dataloader.

    The longer it is trained the worse is its validation: the best is not the last.
    """

    def val_dataloader(self) -> Any:
        return loader(1, 11, sign=-1.0)


class Data(BareData):
    def __init__(self, test_rows: int = 9) -> None:
        super().__init__()
        self.test_rows = test_rows

    def test_dataloader(self) -> Any:
        return loader(2, self.test_rows)

    def predict_dataloader(self) -> Any:
        return loader(3, 10)
