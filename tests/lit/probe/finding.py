"""What the tests of `find_micro_batch` share: modules, data, and memory that ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate
from torchmetrics import MeanMetric

from tests.helpers import trainer as quick
from tests.zoo.modules import Stream, hooked
from trainkit import AccumulationCallback, PerSample, ResumableLoader
from trainkit.lit.probe.find import FoundMicroBatch, find_micro_batch

ROWS = 96
TARGET = 32


class Net(pl.LightningModule):
    """All that a step may move: weights, BatchNorm, dropout, a metric, counters."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.net = nn.Sequential(
                nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)
            ).double()
        self.mean = MeanMetric()
        self.num_rows = 0
        self.sizes: list[int] = []
        self.hooks: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.num_rows += len(x)
        self.sizes.append(len(x))
        loss = (self.net(x).squeeze(1) - y).square().mean()
        self.mean.update(loss)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Limited(Net):
    """Runs out of memory above so many rows; the sizes that it saw are in `seen`, which
    no snapshot knows: it is the class's."""

    limit = 8
    where = "forward"
    seen: list[int]

    def __init__(self) -> None:
        super().__init__()
        self.net[1] = nn.Identity()  # BatchNorm does not train with one row

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        type(self).seen.append(len(batch[0]))
        is_too_large = len(batch[0]) > self.limit
        if is_too_large and self.where == "forward":
            run_out()  # before it logs what ranks would add up
        loss = super().training_step(batch, batch_idx)
        if is_too_large:
            loss.register_hook(lambda gradient: run_out())
        return loss


def limited(*, rows: int, where: str = "forward") -> Limited:
    """One of a class of its own."""
    return hooked(Limited, limit=rows, where=where, seen=[])()


def run_out() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def rows(number: int = ROWS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = torch.randn(number, 5, generator=generator, dtype=torch.float64)
    return [(row[:4], row[4]) for row in draw]


class Data(pl.LightningDataModule):
    """With the size as an attribute, and an order drawn from torch's generator."""

    def __init__(self, batch_size: int = 4, *, number: int = ROWS) -> None:
        super().__init__()
        self.batch_size, self.number, self.num_setups = batch_size, number, 0
        self.collate = self.put_together

    def setup(self, stage: str) -> None:
        self.num_setups += 1

    def put_together(self, rows: Any) -> Any:
        assert self.num_setups, "it is another's method"
        return default_collate(rows)

    def train_dataloader(self) -> Any:
        how: dict[str, Any] = {"shuffle": True, "collate_fn": self.collate}
        return DataLoader(rows(self.number), self.batch_size, **how)  # type: ignore[arg-type]


class HparamsData(pl.LightningDataModule):
    """With the size in `hparams` alone, and an order from a generator of its own."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.generator = torch.Generator().manual_seed(5)

    def train_dataloader(self) -> Any:
        size, how = self.hparams["batch_size"], {"generator": self.generator}
        return DataLoader(rows(), size, shuffle=True, **how)  # type: ignore[arg-type]


WORKERS: dict[str, Any] = {
    "num_workers": 1,
    "persistent_workers": True,
    "multiprocessing_context": "fork",
}


def shuffled_loader(batch_size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    return DataLoader(rows(), batch_size, shuffle=True, generator=generator)  # type: ignore[arg-type]


MAKERS: dict[str, Callable[[int], Any]] = {
    "attribute": Data,
    "hparams": HparamsData,
    "loader": shuffled_loader,
    "stream": lambda size: DataLoader(Stream(rows()), size),
    "resumable": lambda size: ResumableLoader(rows(), size, shuffle=True, seed=2),
    "workers": lambda size: DataLoader(rows(), size, **WORKERS),  # type: ignore[arg-type]
}


def exact() -> pl.Callback:
    return AccumulationCallback(PerSample())


def found(
    module: Any, data: Any, fit: pl.Trainer | None = None, **options: Any
) -> FoundMicroBatch:
    options.setdefault("target", TARGET)
    return find_micro_batch(fit or quick(), module, data, verbose=False, **options)
