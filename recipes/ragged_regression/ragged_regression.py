"""Small data whose last batch is smaller, on scikit-learn's diabetes.

    trainkit train experiment=ragged_regression
    trainkit train -m experiment=ragged_regression data.drop_last=false,true
    python -m recipes.ragged_regression.compare    # the table and picture of README.md

346 rows in batches of 8 end with a batch of 2. It is part of a full window of four,
where a mean of means gives each of its 2 rows four times the weight of any other row
(keras-team/keras#20241). So two experiments that differ only in the size of their
batches have different results.
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from trainkit import (
    AccumulationMixin,
    PerSample,
    ResumableLoader,
)

Batch = dict[str, Tensor]

# ---- data ----------------------------------------------------------------------------


def read_rows(seed: int) -> list[Batch]:
    """All 442 patients, shuffled by seed: 10 features and the progress of the disease,
    each with mean 0 and deviation 1."""
    features, target = load_diabetes(return_X_y=True, scaled=False)
    table = torch.tensor(features, dtype=torch.float32)
    target = torch.tensor(target, dtype=torch.float32)
    table, target = (
        (each - each.mean(0)) / each.std(0, correction=0) for each in (table, target)
    )
    order = torch.randperm(len(target), generator=torch.Generator().manual_seed(seed))
    return [{"x": table[i], "y": target[i]} for i in order.tolist()]


class Diabetes(LightningDataModule):
    """Patients, split into training and validation.

    Args:
        batch_size: patients in a micro-batch.
        drop_last: leave out a last batch that is not full. If not, it weighs less.
        num_train: patients to train on; the rest validates.
        num_val: patients to validate on, at most.
        seed: of the split and of the order of each epoch.
        num_workers: processes that load.
    """

    def __init__(
        self,
        *,
        batch_size: int = 8,
        drop_last: bool = False,
        num_train: int = 346,
        num_val: int = 96,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_train = num_train
        self.num_val = num_val
        self.seed = seed
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        rows = read_rows(self.seed)
        end = self.num_train + self.num_val
        self.train_rows, self.val_rows = (
            rows[: self.num_train],
            rows[self.num_train : end],
        )

    def train_dataloader(self) -> ResumableLoader:
        return ResumableLoader(
            self.train_rows,
            batch_size=self.batch_size,
            shuffle=True,
            seed=self.seed,
            drop_last=self.drop_last,
            num_workers=self.num_workers,
        )

    def val_dataloader(self) -> ResumableLoader:
        return ResumableLoader(self.val_rows, batch_size=32)


# ---- model ---------------------------------------------------------------------------


class Regression(AccumulationMixin, LightningModule):
    """A perceptron of one hidden layer, trained on a mean of squared errors.

    Args:
        width: of the hidden layer.
    """

    def __init__(self, *, width: int = 32) -> None:
        super().__init__()
        self.accumulation = PerSample()  # what the loss divides by
        self.net = nn.Sequential(nn.Linear(10, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, features: Tensor) -> Tensor:
        return self.net(features).squeeze(-1)

    def loss(self, batch: Batch) -> Tensor:
        return mse_loss(self(batch["x"]), batch["y"])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log_exact("val/loss", loss, batch, prog_bar=True)


if __name__ == "__main__":
    from trainkit.cli.script import train_file

    train_file(
        __file__, "experiment=ragged_regression", model="Regression", data="Diabetes"
    )
