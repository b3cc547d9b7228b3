"""BatchNorm and a loss across rows: a U-Net that finds shapes, trained by Dice.

    trainkit train experiment=segmentation

Two things here look across the images of a batch. BatchNorm normalises by all of them,
and Dice divides by the area of a class in all of them. So a window of 64 images that is
cut into fours must not be 16 small batches. `training_step` runs once on 64 images, the
net in chunks of 4 (`MicroBatching(inside="net")`), and its BatchNorm layers see the
whole window (`BatchNormGuard("exact")`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainkit import AccumulationMixin, ResumableLoader

Batch = list[Tensor]  # images, and the class of each pixel
CLASSES = ("background", "disc", "square", "triangle")

# ---- data ----------------------------------------------------------------------------


def draw_shapes(seed: int, row: int, side: int) -> tuple[Tensor, Tensor]:
    """An image of one to three shapes in noise, and the class of each pixel.

    Colours say nothing, and what is drawn depends on seed and row alone.

    >>> image, classes = draw_shapes(seed=0, row=0, side=32)
    >>> list(image.shape), list(classes.shape), int(classes.max()) < len(CLASSES)
    ([3, 32, 32], [32, 32], True)
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + row)
    down, right = torch.meshgrid(*[torch.arange(float(side))] * 2, indexing="ij")
    image = torch.rand(3, 1, 1, generator=generator).expand(3, side, side).clone()
    classes = torch.zeros(side, side, dtype=torch.long)
    for _ in range(int(torch.randint(1, 4, (), generator=generator))):
        kind = int(torch.randint(1, len(CLASSES), (), generator=generator))
        place = torch.rand(3, generator=generator)
        radius = side * (0.1 + 0.15 * float(place[0]))
        y, x = down - side * float(place[1]), right - side * float(place[2])
        inside = {
            "disc": x**2 + y**2 <= radius**2,
            "square": torch.maximum(x.abs(), y.abs()) <= 0.9 * radius,
            "triangle": (x.abs() <= (y + radius) / 2) & (y <= radius),
        }[CLASSES[kind]]
        colour = torch.rand(3, 1, generator=generator)
        image[:, inside], classes[inside] = colour, kind
    return image + 0.1 * torch.randn(image.shape, generator=generator), classes


class Shapes(LightningDataModule):
    """Images of discs, squares and triangles, drawn on the spot.

    Args:
        batch_size: images in a batch of the loader.
        num_train: images to train on.
        num_val: images to validate on.
        side: pixels of an image, down and across.
        seed: of the images and of the order of each epoch.
        num_workers: processes that load.
    """

    def __init__(
        self,
        *,
        batch_size: int = 64,
        num_train: int = 1000,
        num_val: int = 256,
        side: int = 32,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_train = num_train
        self.num_val = num_val
        self.side = side
        self.seed = seed
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        self.train_rows = self._draw(range(self.num_train))
        self.val_rows = self._draw(range(self.num_train, self.num_train + self.num_val))

    def _draw(self, rows: range) -> TensorDataset:
        drawn = [draw_shapes(self.seed, row, self.side) for row in rows]
        images, classes = zip(*drawn, strict=True)
        return TensorDataset(torch.stack(images), torch.stack(classes))

    def train_dataloader(self) -> ResumableLoader:
        return ResumableLoader(
            self.train_rows,
            batch_size=self.batch_size,
            shuffle=True,
            seed=self.seed,
            num_workers=self.num_workers,
        )

    def val_dataloader(self) -> ResumableLoader:
        # All in one batch: the Dice of a part is another number.
        return ResumableLoader(self.val_rows, batch_size=self.num_val)


# ---- loss ----------------------------------------------------------------------------


def areas(likely: Tensor, classes: Tensor) -> Tensor:
    """For each class, twice what prediction and truth share, and what both have.

    >>> truth = torch.tensor([[[0, 1], [1, 1]]])
    >>> areas(torch.full((1, 2, 2, 2), 0.5), truth)
    tensor([[1., 3.],
            [3., 5.]])

    Args:
        likely: how likely each class is for each pixel: rows x classes x pixels.
        classes: the class of each pixel.
    """
    truth = F.one_hot(classes, likely.shape[1]).movedim(-1, 1).to(likely)
    dims = (0, *range(2, likely.ndim))
    return torch.stack([2 * (likely * truth).sum(dims), (likely + truth).sum(dims)])


def dice(areas: Tensor) -> Tensor:
    """The Dice coefficient of each class (arXiv 1606.04797).

    >>> dice(torch.tensor([[1.0, 3.0], [3.0, 5.0]]))
    tensor([0.3333, 0.6000])
    """
    shared, both = areas
    return shared / both.clamp(min=1e-6)


# ---- model ---------------------------------------------------------------------------


class UNet(nn.Module):
    """Down three times and up again, with BatchNorm behind each convolution
    (arXiv 1505.04597).

    Args:
        width: channels at full size; each level below has twice as many.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(
            _block(c_in, c_out)
            for c_in, c_out in zip([3, *widths], widths, strict=False)
        )
        self.bottom = _block(widths[-1], widths[-1])
        self.up = nn.ModuleList(
            _block(2 * c_in, max(c_in // 2, width)) for c_in in reversed(widths)
        )
        self.head = nn.Conv2d(width, len(CLASSES), 1)

    def forward(self, images: Tensor) -> Tensor:
        x, kept = images, []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, kept.pop()], dim=1))
        return self.head(x)


def _block(c_in: int, c_out: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (c_in, c_out):
        layers += [
            nn.Conv2d(channels, c_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(c_out),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers)


class Segmentation(AccumulationMixin, LightningModule):
    """Finds the class of each pixel. It knows nothing of windows and has no strategy.

    Args:
        width: channels of the net at full size.
    """

    def __init__(self, *, width: int = 8) -> None:
        super().__init__()
        self.net = UNet(width)

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images).softmax(dim=1)

    def areas(self, batch: Batch) -> Tensor:
        images, classes = batch
        own = areas(self(images), classes)
        # Dice is of all ranks' images; one process has them all.
        everyone: Tensor = self.all_gather(own, sync_grads=True)  # type: ignore[assignment]
        return everyone.view(-1, *own.shape).sum(0)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = 1 - dice(self.areas(batch)).mean()
        self.log("train/loss", loss.detach())
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        found = dice(self.areas(batch))
        num_images = len(batch[0])
        shapes = found[1:].mean()  # without the background
        self.log_exact("val/dice", shapes, weight=num_images, prog_bar=True)
        for name, value in zip(CLASSES, found, strict=True):
            self.log_exact(f"val/dice_{name}", value, weight=num_images)


if __name__ == "__main__":
    from trainkit.cli.script import train_file

    train_file(__file__, "experiment=segmentation", model="Segmentation", data="Shapes")
