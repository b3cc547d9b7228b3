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
from trainkit import (
    AccumulationCallback,
    AccumulationMixin,
    BatchNormGuard,
    MicroBatching,
    PerSample,
)

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


class Bare(Images):
    """Its layers stand in the module itself, some are called in the step."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        torch.manual_seed(4)
        self.stem = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm2d(5)
        self.inner = nn.Linear(5, 5)
        self.twice = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(self.stem(x))).mean((2, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("seen", batch[0].sum(), reduce_fx="sum", on_epoch=True)
        hidden = self(batch[0])
        more = self.twice(self.inner(hidden))
        hidden = hidden + self.twice(more.square())
        return F.cross_entropy(self.head(hidden), batch[1])


class Mixed(AccumulationMixin, Images):
    accumulation = PerSample()
    micro_batching = MicroBatching(size=4)


class Listed(Images):
    """Its blocks stand in a list, which itself is never called."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        blocks = [
            nn.Sequential(nn.Conv2d(c, 5, 3, padding=1), nn.BatchNorm2d(5), nn.Tanh())
            for c in (3, 5)
        ]
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(5, CLASSES)
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = batch[0]
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(hidden.mean((2, 3))), batch[1])


class Stem(Images):
    """Calls a layer of its own in the step, and has no forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.BatchNorm2d(3).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(self.stem(batch[0])), batch[1])


class ByHand(AccumulationMixin, Images):
    accumulation = PerSample()

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.accumulate(F.cross_entropy(self.net(batch[0]), batch[1]), batch)
        self.finish_window(optimizer)
        optimizer.step()  # type: ignore[union-attr]
        optimizer.zero_grad()  # type: ignore[union-attr]


def without_statistics() -> Images:
    torch.manual_seed(4)
    norm = nn.BatchNorm2d(4, track_running_stats=False)
    end = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES)
    return Images(nn.Sequential(nn.Conv2d(3, 4, 3), norm, *end))


def evaluating() -> Images:
    module = Images()
    module.net.eval()
    return module


def partly_frozen() -> Images:
    """Frozen layers, frozen weights and other norms."""
    torch.manual_seed(4)
    norms = nn.InstanceNorm2d(4, affine=True), nn.GroupNorm(2, 4)
    parts = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), *norms, nn.BatchNorm2d(4)
    end = nn.BatchNorm1d(4, affine=False, track_running_stats=False)
    flat = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    net = nn.Sequential(*parts, *flat, end, nn.Linear(4, CLASSES))
    net[4].eval()
    net[0].requires_grad_(False)
    return Images(net)


class Thawed(pl.Callback):
    """Lets the layers evaluate until the second epoch begins."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        for layer in pl_module.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.train(trainer.current_epoch > 0)


def images(number: int = 26) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(number, 3, 6, 6, dtype=torch.float64, generator=generator)
    y = torch.randint(CLASSES, (number,), generator=generator)
    return TensorDataset(x + y[:, None, None, None] * 0.3, y)


def loader(batch_size: int = 10, number: int = 26) -> DataLoader[Any]:
    """Of 26 images the last of three batches has 6."""
    return DataLoader(images(number), batch_size=batch_size)


def exact(cut: MicroBatching | None, proof: Any = "warn") -> list[pl.Callback]:
    """The callbacks of a training whose micro-batches share statistics."""
    ours = AccumulationCallback(PerSample(), micro_batching=cut, proof=proof)
    return [ours, BatchNormGuard("exact")]


def fit(
    module: pl.LightningModule,
    *callbacks: pl.Callback,
    window: int = 1,
    epochs: int = 2,
    batches: Any = None,
    **options: Any,
) -> pl.Trainer:
    """Six steps, unless something else is asked for."""
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
