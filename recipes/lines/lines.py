"""A classifier of lines: which package of Python's standard library is it from?

    trainkit train experiment=lines
    trainkit test outputs/lines/...     # the best checkpoint, on lines never seen

A plain module and plain data, the smallest recipe: `trainkit new` copies it. Windows
have four micro-batches of 64 lines, and the last one of an epoch is short.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainkit import ResumableLoader

Batch = dict[str, Tensor]

PACKAGES = ("asyncio", "email", "http", "json", "logging", "sqlite3", "unittest", "xml")
WIDTH = 72
"""The bytes of a line that are kept; shorter lines end with zeros."""

# ---- data ----------------------------------------------------------------------------


def read_rows(seed: int) -> list[Batch]:
    """The different lines of each package, with its index, shuffled by seed."""
    rows = []
    for label, package in enumerate(PACKAGES):
        paths = sorted(Path(sysconfig.get_path("stdlib"), package).rglob("*.py"))
        source = b"\n".join(
            path.read_bytes() for path in paths if "test" not in path.parts
        )
        lines = {line.strip()[:WIDTH] for line in source.splitlines()}
        for line in sorted(line for line in lines if len(line) > 20):
            text = torch.tensor(list(line.ljust(WIDTH, b"\0")))
            rows.append({"text": text, "label": torch.tensor(label)})
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    return [rows[i] for i in order.tolist()]


class Lines(LightningDataModule):
    """Lines in three parts: to train on, to validate and to test.

    Args:
        batch_size: lines in a micro-batch.
        num_train: lines to train on, at most.
        num_val: lines to validate on, and as many to test.
        seed: of the split and of the order of each epoch.
        num_workers: processes that load.
    """

    def __init__(
        self,
        *,
        batch_size: int = 64,
        num_train: int = 20_000,
        num_val: int = 2_000,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size, self.num_workers, self.seed = batch_size, num_workers, seed
        self.num_train, self.num_val = num_train, num_val

    def setup(self, stage: str) -> None:
        rows, n = read_rows(self.seed), self.num_val
        self.val_rows, self.test_rows = rows[:n], rows[n : 2 * n]
        self.train_rows = rows[2 * n :][: self.num_train]

    def loader(self, rows: list[Batch], *, shuffle: bool = False) -> ResumableLoader:
        return ResumableLoader(
            rows,
            batch_size=self.batch_size,
            shuffle=shuffle,
            seed=self.seed,
            num_workers=self.num_workers,
        )

    def train_dataloader(self) -> ResumableLoader:
        return self.loader(self.train_rows, shuffle=True)

    def val_dataloader(self) -> ResumableLoader:
        return self.loader(self.val_rows)

    def test_dataloader(self) -> ResumableLoader:
        return self.loader(self.test_rows)

    def predict_dataloader(self) -> DataLoader[Batch]:
        # Lightning makes a loader of its own of this one, so it is a plain one.
        rows: Any = self.test_rows
        return DataLoader(rows, batch_size=self.batch_size)


# ---- model ---------------------------------------------------------------------------


class Classifier(LightningModule):
    """A convolution over bytes, the largest value of each channel, a linear layer.

    Args:
        width: channels of the convolution.
    """

    def __init__(self, *, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.conv = nn.Conv1d(32, width, kernel_size=5, padding=2)
        self.head = nn.Linear(width, len(PACKAGES))

    def forward(self, text: Tensor) -> Tensor:
        found = F.relu(self.conv(self.embed(text).mT))
        return self.head(found.amax(-1))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch["text"]), batch["label"])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.evaluate(batch, "test")

    def evaluate(self, batch: Batch, stage: str) -> None:
        logits, label = self(batch["text"]), batch["label"]
        right = (logits.argmax(-1) == label).float().mean()
        values = {"loss": F.cross_entropy(logits, label), "accuracy": right}
        named = {f"{stage}/{name}": value for name, value in values.items()}
        self.log_dict(named, batch_size=len(label), prog_bar=True)

    def predict_step(self, batch: Batch, batch_idx: int) -> Batch:
        odds = self(batch["text"]).softmax(-1)
        return {"package": odds.argmax(-1), "odds": odds.amax(-1)}


if __name__ == "__main__":
    from trainkit.cli.script import train_file

    train_file(__file__, "experiment=lines", model="Classifier", data="Lines")
