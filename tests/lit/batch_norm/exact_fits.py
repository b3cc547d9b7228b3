"""Trainings with exact BatchNorm, and the same on whole batches without trainkit."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.helpers import trainer
from trainkit import AccumulationCallback, BatchNormGuard, MicroBatching, PerSample

CLASSES = 4


class Net(nn.Module):
    """Two BatchNorms, a skip connection and a ReLU in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.last_norm = nn.BatchNorm2d(6, momentum=None)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norm(self.first(x)), inplace=True)
        hidden = hidden + self.last_norm(self.second(hidden))
        return self.head(F.relu(hidden).mean((2, 3)))


class Images(pl.LightningModule):
    """Logs and counts as a module of anybody's does; knows nothing of trainkit."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = net or Net()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.mean = MeanMetric()
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.log("brightness", x.mean(), on_step=False, on_epoch=True)
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        self.accuracy(logits.detach(), y)
        self.mean(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return {"loss": loss, "logits": logits}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def images(number: int = 26) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(number, 3, 6, 6, dtype=torch.float64, generator=generator)
    y = torch.randint(CLASSES, (number,), generator=generator)
    return TensorDataset(x + y[:, None, None, None] * 0.3, y)


def loader(batch_size: int = 10, number: int = 26) -> DataLoader[Any]:
    """Of 26 images the last of three batches has 6."""
    return DataLoader(images(number), batch_size=batch_size)


def exact(cut: MicroBatching, strategy: Any = None) -> list[pl.Callback]:
    """The callbacks of a training whose micro-batches share statistics."""
    strategy = strategy or PerSample()
    return [
        AccumulationCallback(strategy, micro_batching=cut),
        BatchNormGuard("exact"),
    ]


def fit(
    module: pl.LightningModule,
    *callbacks: pl.Callback,
    window: int = 1,
    epochs: int = 4,
    batches: Any = None,
    **options: Any,
) -> pl.Trainer:
    """Twelve steps, unless something else is asked for."""
    fitted = trainer(window, callbacks=list(callbacks), max_epochs=epochs, **options)
    fitted.fit(module, batches or loader())
    return fitted


def apart(module: nn.Module, other: nn.Module) -> float:
    """The largest difference of weights, and of running statistics."""
    pairs = zip(_values(module), _values(other), strict=True)
    return max(float((one - two).abs().max()) for one, two in pairs)


def _values(module: nn.Module) -> list[Tensor]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return [each.detach().double() for _, each in named]
