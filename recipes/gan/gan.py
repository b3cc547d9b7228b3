"""Manual optimization with two optimizers: a generative adversarial net on digits.

    trainkit train experiment=gan

Critic and generator each have a window of their own, and the module closes both itself.
With 1,346 images in micro-batches of 64 and windows of 4, the last window of an epoch
has 64 and 2 images. A mean of means would give the 2 half of the step.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import normalize, softplus

from trainkit import AccumulationMixin, PerSample, ResumableLoader

Batch = dict[str, Tensor]

# ---- data ----------------------------------------------------------------------------


def read_digits(seed: int) -> Tensor:
    """All 1,797 digits, shuffled by seed: rows of 64 values from -1 to 1."""
    digits: Any = load_digits()
    order = torch.randperm(
        len(digits.data), generator=torch.Generator().manual_seed(seed)
    )
    return torch.tensor(digits.data, dtype=torch.float32)[order] / 8 - 1


class Digits(LightningDataModule):
    """Handwritten digits and noise, split into training and validation.

    Args:
        batch_size: images in a micro-batch.
        latent: how many numbers of noise each image has.
        num_train: images to train on; the rest validates.
        num_val: images to validate on, at most.
        seed: of the split and of the order of each epoch.
        num_workers: processes that load.
    """

    def __init__(
        self,
        *,
        batch_size: int = 64,
        latent: int = 16,
        num_train: int = 1346,
        num_val: int = 451,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.latent = latent
        self.num_train = num_train
        self.num_val = num_val
        self.seed = seed
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        images = read_digits(self.seed)
        rows = [{"real": image, "row": row} for row, image in enumerate(images)]
        end = self.num_train + self.num_val
        self.train_rows = rows[: self.num_train]
        self.val_rows = rows[self.num_train : end]

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Batch:
        """Draw the noise: here, since the loader does not know the epoch."""
        assert self.trainer is not None
        epoch = self.trainer.current_epoch if self.trainer.training else 0
        return self.with_noise(batch, epoch=epoch)

    def with_noise(self, batch: Batch, *, epoch: int) -> Batch:
        """Add noise to a batch. It depends on seed, epoch and row alone, and not on the
        cut, the rank or the process that reads a row."""
        noise = []
        for row in batch["row"].tolist():
            seed = (self.seed * 1_000_003 + epoch) * 1_000_003 + row
            generator = torch.Generator().manual_seed(seed % 2**63)
            noise.append(torch.randn(self.latent, generator=generator))
        return {**batch, "noise": torch.stack(noise)}

    def train_dataloader(self) -> ResumableLoader:
        return ResumableLoader(
            self.train_rows,
            batch_size=self.batch_size,
            shuffle=True,
            seed=self.seed,
            num_workers=self.num_workers,
        )

    def val_dataloader(self) -> ResumableLoader:
        # All in one batch: the distance of two sets is no mean over their parts.
        return ResumableLoader(self.val_rows, batch_size=self.num_val)


# ---- distance ------------------------------------------------------------------------


def sliced_wasserstein(
    one: Tensor, other: Tensor, *, num_slices: int = 500, seed: int = 0
) -> Tensor:
    """How far two sets of equally many points are apart, along random directions.

    Along a direction, sorted points are paired; the root of the mean squared distance
    over all pairs and directions is the distance (Rabin et al. 2011).

    >>> points = torch.randn(100, 3)
    >>> float(sliced_wasserstein(points, points.flip(0)))
    0.0

    Args:
        one: points in rows.
        other: as many of them.
        num_slices: directions.
        seed: of the directions, so that each call uses equal ones.
    """
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(one.shape[1], num_slices, generator=generator)
    directions = normalize(directions, dim=0).to(one)
    apart = (one @ directions).sort(0).values - (other @ directions).sort(0).values
    return apart.square().mean().sqrt()


# ---- model ---------------------------------------------------------------------------


class DigitsGAN(AccumulationMixin, LightningModule):
    """Two small perceptrons, one of which learns to deceive the other.

    It brings its optimizers: `optimizer=none scheduler=none`.

    Args:
        latent: how many numbers an image is made of.
        width: the width of both nets.
        lr: the rate of both optimizers.
        gamma: the factor of the penalty on the critic's slope.
        average: the decay of a moving average of the generator's weights, which makes
            the images for validation.
    """

    def __init__(
        self,
        *,
        latent: int = 16,
        width: int = 128,
        lr: float = 0.002,
        gamma: float = 0.3,
        average: float = 0.99,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.accumulation = PerSample()
        self.lr = lr
        self.gamma = gamma
        self.average = average
        self.generator = _perceptron(latent, width, 64, nn.ReLU(), nn.Tanh())
        self.critic = _perceptron(64, width, 1, nn.LeakyReLU(0.2))
        self.averaged = _perceptron(latent, width, 64, nn.ReLU(), nn.Tanh())
        self.averaged.load_state_dict(self.generator.state_dict())
        self.averaged.requires_grad_(False)

    def forward(self, noise: Tensor) -> Tensor:
        return self.averaged(noise)

    def critic_loss(self, batch: Batch) -> Tensor:
        """The critic's loss, a mean over images: real against fake, with a penalty on
        the slope at real images, without which both nets run in circles (Mescheder et
        al. 2018)."""
        images = batch["real"].detach().requires_grad_()
        real = self.critic(images)
        fake = self.critic(self.generator(batch["noise"]).detach())
        (slope,) = torch.autograd.grad(real.sum(), images, create_graph=True)
        penalty = slope.square().sum(1).mean() / 2
        return softplus(-real).mean() + softplus(fake).mean() + self.gamma * penalty

    def generator_loss(self, batch: Batch) -> Tensor:
        return softplus(-self.critic(self.generator(batch["noise"]))).mean()

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        of_generator, of_critic = self.optimizers()  # type: ignore[misc]
        both = ((of_critic, self.critic_loss), (of_generator, self.generator_loss))
        for optimizer, loss_of in both:
            self.toggle_optimizer(optimizer)
            self.accumulate(loss_of(batch), batch, optimizer=optimizer)
            self.untoggle_optimizer(optimizer)
        if self.window_ends(batch_idx):  # as trainer.accumulate_grad_batches says
            # Both step only now: a critic that had stepped earlier would change the
            # generator's loss within the window.
            for optimizer, _ in both:
                self.finish_window(optimizer)
                optimizer.step()
                optimizer.zero_grad()
            self._follow()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        distance = sliced_wasserstein(self(batch["noise"]), batch["real"])
        num_images = len(batch["real"])
        self.log_exact("val/distance", distance, weight=num_images, prog_bar=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(net.parameters(), lr=self.lr, betas=(0.5, 0.999))
            for net in (self.generator, self.critic)
        ]

    @torch.no_grad()
    def _follow(self) -> None:
        for old, new in zip(
            self.averaged.parameters(), self.generator.parameters(), strict=True
        ):
            old.lerp_(new, 1 - self.average)


def _perceptron(
    size_in: int, width: int, size_out: int, bend: nn.Module, *last: nn.Module
) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(size_in, width),
        bend,
        nn.Linear(width, width),
        bend,
        nn.Linear(width, size_out),
        *last,
    )


if __name__ == "__main__":
    from trainkit.cli.script import train_file

    train_file(__file__, "experiment=gan", model="DigitsGAN", data="Digits")
