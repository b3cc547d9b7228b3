"""What a user of the Lightning CLI brings: modules, data, a strategy."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch

from tests.helpers import TokenNet, loader, pad, ragged_sequences, token_loss
from trainkit import AccumulationMixin, AccumulationStrategy, ResumableLoader, Uniform

SEQUENCES = ragged_sequences(22)
BATCH = 3
WINDOW = 4


class Net(pl.LightningModule):
    """A module that knows nothing of trainkit."""

    def __init__(self, lr: float = 0.5) -> None:
        super().__init__()
        self.net = TokenNet()
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return token_loss(self.net, batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", token_loss(self.net, batch), batch_size=len(batch["ids"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class MixinNet(AccumulationMixin, Net):
    """The same, with a strategy of its own choice."""

    accumulation = Uniform()


class Configured(Net):
    """Takes its strategy as an argument."""

    def __init__(
        self, strategy: AccumulationStrategy | None = None, lr: float = 0.5
    ) -> None:
        super().__init__(lr)
        self.strategy = strategy


class WithoutOptimizer(pl.LightningModule):
    """Leaves its optimizer to the command line."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TokenNet()


class Data(pl.LightningDataModule):
    """Ragged sequences."""

    def __init__(self, batch_size: int = BATCH) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return loader(SEQUENCES, self.batch_size)

    def val_dataloader(self) -> Any:
        return loader(SEQUENCES, self.batch_size)


class ResumableData(Data):
    """Shuffled, and goes on within an epoch."""

    def train_dataloader(self) -> Any:
        return ResumableLoader(
            SEQUENCES, batch_size=self.batch_size, shuffle=True, collate_fn=pad
        )


def count_tokens(module: Any, batch: Any) -> int:
    """What `Net` divides by."""
    return int((batch["labels"] != -100).sum())


class ByRow(AccumulationStrategy):
    """A strategy that trainkit does not have."""

    def __init__(self, *, factor: float = 1.0) -> None:
        self.factor = factor

    def weight(self, batch: Any) -> float:
        return self.factor * len(batch["ids"]) ** 2
