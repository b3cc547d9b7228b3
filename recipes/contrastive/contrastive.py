"""A loss across rows: contrastive learning with the negatives of a big batch.

    trainkit train experiment=contrastive

NT-Xent compares each image with all others of its batch, so no accumulation of
micro-batches can have the big batch's gradient: each sees its own negatives alone. The
inner cut (`MicroBatching(inside="net")`) can: `training_step` runs once on 512 images,
and only the net runs in chunks of 32.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from sklearn.datasets import load_digits
from torch import Tensor, nn

from trainkit import AccumulationMixin, ResumableLoader

Batch = dict[str, Tensor]

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
    """Handwritten digits and two views of each, split into training and validation.

    Args:
        batch_size: images in a batch of the loader.
        num_train: images to train on; the rest validates.
        num_val: images to validate on, at most.
        seed: of the split, of the order of each epoch, and of the views.
        num_workers: processes that load.
    """

    def __init__(
        self,
        *,
        batch_size: int = 512,
        num_train: int = 1024,
        num_val: int = 512,
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
        rows = [
            {"image": image, "label": label, "row": row}
            for row, (image, label) in enumerate(zip(images, labels, strict=True))
        ]
        self.train_rows = rows[: self.num_train]
        self.val_rows = rows[self.num_train : end]

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Batch:
        """Draw the views: here, since the loader does not know the epoch."""
        assert self.trainer is not None
        epoch = self.trainer.current_epoch if self.trainer.training else 0
        return self.with_views(batch, epoch=epoch)

    def with_views(self, batch: Batch, *, epoch: int) -> Batch:
        """Add two views of each image. They depend on seed, epoch and row alone, and
        not on the cut, the rank or the process that reads a row."""
        draws = []
        for row in batch["row"].tolist():
            seed = (self.seed * 1_000_003 + epoch) * 1_000_003 + row
            generator = torch.Generator().manual_seed(seed % 2**63)
            draws.append(torch.randn(2, 5 + 64, generator=generator))
        one, other = torch.stack(draws, dim=1).to(batch["image"])
        images = batch["image"]
        return {**batch, "one": view(images, one), "other": view(images, other)}

    def train_dataloader(self) -> ResumableLoader:
        return ResumableLoader(
            self.train_rows,
            batch_size=self.batch_size,
            shuffle=True,
            seed=self.seed,
            num_workers=self.num_workers,
        )

    def val_dataloader(self) -> ResumableLoader:
        # All in one batch: the loss of a part has fewer negatives.
        return ResumableLoader(self.val_rows, batch_size=self.num_val)


def view(images: Tensor, draws: Tensor) -> Tensor:
    """Turned, stretched, moved, lighter or darker, with noise: by normal numbers.

    Args:
        images: 8 x 8.
        draws: for each image 5 numbers and 64 for the noise.
    """
    angle, size, right, down, light = draws[:, :5].unbind(1)
    size = (0.15 * size).exp()
    sine, cosine = size * (0.25 * angle).sin(), size * (0.25 * angle).cos()
    moves = torch.stack(
        [cosine, -sine, 0.15 * right, sine, cosine, 0.15 * down], dim=1
    ).view(-1, 2, 3)
    grid = F.affine_grid(moves, list(images.shape), align_corners=False)
    moved = F.grid_sample(images, grid, align_corners=False)
    light = (0.2 * light).exp().view(-1, 1, 1, 1)
    return light * moved + 0.1 * draws[:, 5:].view_as(images)


# ---- loss ----------------------------------------------------------------------------


def nt_xent(one: Tensor, other: Tensor, temperature: float) -> Tensor:
    """Which of all other rows is the other view of mine? (arXiv 2002.05709)

    >>> rows = torch.eye(2)
    >>> float(nt_xent(rows, rows, temperature=0.01))
    0.0

    Args:
        one: a view of each image, as a row.
        other: another view of each.
        temperature: what likeness is divided by.
    """
    both = F.normalize(torch.cat([one, other]), dim=1)
    itself = torch.eye(len(both), dtype=torch.bool, device=both.device)
    likeness = (both @ both.T / temperature).masked_fill(itself, float("-inf"))
    partner = torch.arange(len(both), device=both.device).roll(len(one))
    return F.cross_entropy(likeness, partner)


# ---- model ---------------------------------------------------------------------------


class Contrastive(AccumulationMixin, LightningModule):
    """A convolutional encoder and a projection, trained without labels.

    It has no strategy: with an inner cut its loss may be anything.

    Args:
        width: channels of the first two convolutions; the others have twice as many.
        temperature: of NT-Xent.
    """

    def __init__(self, *, width: int = 16, temperature: float = 0.1) -> None:
        super().__init__()
        self.temperature = temperature
        encoder = nn.Sequential(
            *_block(1, width),
            *_block(width, width),
            *_block(width, 2 * width, stride=2),
            *_block(2 * width, 2 * width),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        head = nn.Sequential(
            nn.Linear(8 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 32)
        )
        # What runs in chunks: rows of it do not see each other.
        self.net = nn.Sequential(OrderedDict(encoder=encoder, head=head))

    def forward(self, images: Tensor) -> Tensor:
        return self.net.get_submodule("encoder")(images)

    def loss(self, batch: Batch) -> Tensor:
        one, other = self.net(batch["one"]), self.net(batch["other"])
        # The other ranks' rows are negatives too; one process has them all.
        all_rows: Any = self.all_gather((one, other), sync_grads=True)
        return nt_xent(
            *(each.flatten(0, -2) for each in all_rows), temperature=self.temperature
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/nt_xent", loss.detach())
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        accuracy = self.probe(data.train_rows, data.val_rows)
        num_images = len(batch["image"])
        loss = self.loss(batch)
        self.log_exact("val/nt_xent", loss, weight=num_images, prog_bar=True)
        self.log_exact("val/probe", accuracy, weight=num_images)

    def probe(self, known: Any, asked: Any) -> float:
        """The accuracy of a linear classifier on the encoder's features.

        Args:
            known: rows whose labels it learns.
            asked: rows whose labels it says.
        """
        features, labels = [], []
        for rows in (known, asked):
            images = torch.stack([row["image"] for row in rows])
            with torch.no_grad():
                found = self(images.to(next(self.parameters()))).double().cpu()
            features.append(F.pad(found, (0, 1), value=1.0))
            labels.append(torch.stack([row["label"] for row in rows]))
        # Ridge regression onto one-hot labels, in closed form.
        x, y = features[0], F.one_hot(labels[0], 10).double()
        ridge = 1e-3 * len(x) * torch.eye(x.shape[1], dtype=x.dtype)
        linear = torch.linalg.solve(x.T @ x + ridge, x.T @ y)
        right = (features[1] @ linear).argmax(1) == labels[1]
        return float(right.double().mean())


def _block(c_in: int, c_out: int, *, stride: int = 1) -> list[nn.Module]:
    # Not BatchNorm, which would normalise by all rows.
    return [
        nn.Conv2d(c_in, c_out, 3, stride, padding=1, bias=False),
        nn.GroupNorm(4, c_out),
        nn.ReLU(),
    ]


if __name__ == "__main__":
    from trainkit.cli.script import train_file

    train_file(__file__, "experiment=contrastive", model="Contrastive", data="Digits")
