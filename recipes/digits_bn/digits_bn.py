"""BatchNorm under accumulation, on scikit-learn's digits.

    trainkit train experiment=digits_bn
    trainkit train -m experiment=digits_bn batchnorm=warn,momentum,recalibrate

A small convolutional net sees 4 images in a forward pass and steps once in 16 of them.
So its BatchNorm layers normalise by 4 images, and by 64 in the big batch. README.md
shows what each policy of `conf/batchnorm` does about that. Late in the training,
windows become smaller, and the learning rate with them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainkit import AccumulationMixin, ResumableLoader

Batch = list[Tensor]  # images, labels

# ---- data ----------------------------------------------------------------------------


def read_digits(seed: int) -> tuple[Tensor, Tensor]:
    """All 1,797 digits, shuffled by seed: images from 0 to 1, and their labels."""
    digits: Any = load_digits()
    order = torch.randperm(
        len(digits.target), generator=torch.Generator().manual_seed(seed)
    )
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return images[order], torch.tensor(digits.target)[order]


class Digits(LightningDataModule):
    """Handwritten digits, split into training and validation.

    1,206 digits make 301 micro-batches of 4 images and one of 2, which weighs half as
    much as the others.

    Args:
        batch_size: images in a micro-batch.
        num_train: images to train on; the rest validates.
        num_val: images to validate on, at most.
        seed: of the split and of the order of each epoch.
        num_workers: processes that load.
    """

    def __init__(
        self,
        *,
        batch_size: int = 4,
        num_train: int = 1206,
        num_val: int = 591,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_train = num_train
        self.num_val = num_val
        self.seed = seed
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        images, labels = read_digits(self.seed)
        end = self.num_train + self.num_val
        self.train_rows = TensorDataset(
            images[: self.num_train], labels[: self.num_train]
        )
        self.val_rows = TensorDataset(
            images[self.num_train : end], labels[self.num_train : end]
        )

    def train_dataloader(self) -> ResumableLoader:
        return ResumableLoader(
            self.train_rows,
            batch_size=self.batch_size,
            shuffle=True,
            seed=self.seed,
            num_workers=self.num_workers,
        )

    def val_dataloader(self) -> ResumableLoader:
        return ResumableLoader(self.val_rows, batch_size=100)


# ---- model ---------------------------------------------------------------------------


class DigitsNet(AccumulationMixin, LightningModule):
    """Four convolutions with BatchNorm; no strategy or optimizer of its own.

    Args:
        width: channels of the first two convolutions; the others have twice as many.
    """

    def __init__(self, *, width: int = 16) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *_block(1, width),
            *_block(width, width),
            *_block(width, 2 * width, stride=2),
            *_block(2 * width, 2 * width),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        right = (logits.argmax(1) == labels).float().mean()
        num_images = len(labels)  # whatever the strategy weighs
        loss = F.cross_entropy(logits, labels)
        self.log_exact("val/accuracy", right, weight=num_images, prog_bar=True)
        self.log_exact("val/loss", loss, weight=num_images)


def _block(c_in: int, c_out: int, *, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(c_in, c_out, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(c_out),
        nn.ReLU(),
    ]


if __name__ == "__main__":
    from trainkit.cli.script import train_file

    train_file(__file__, "experiment=digits_bn", model="DigitsNet", data="Digits")
