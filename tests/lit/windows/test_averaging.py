"""Callbacks that average weights average exact ones, and see no step too many."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn

from tests.helpers import deviation, ragged_sequences, trainer, weights
from tests.lit.fronts import (
    RAGGED,
    WINDOW,
    Mixed,
    Plain,
    merged,
    micro_batches,
)
from trainkit import AccumulationCallback, AccumulationMixin, PerSample, PerToken

SEQUENCES = ragged_sequences(38)


class Normed(pl.LightningModule):
    """With BatchNorm, whose statistics an extra epoch collects."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(
                nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)
            ).double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class MixedNormed(AccumulationMixin, Normed):
    accumulation = PerSample()


class LastEpoch(pl.Callback):
    """Keeps the weights at the start of an epoch and after each of its batches."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.seen: list[Tensor] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen.clear()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.current_epoch == self.epoch:
            self.seen.append(weights(pl_module))


def fit_with_swa(module: pl.LightningModule, *ours: pl.Callback) -> LastEpoch:
    """Three epochs, averaging from the second on, and the BatchNorm epoch."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(14, 3, generator=generator, dtype=torch.float64)
    batches = torch.utils.data.DataLoader(data, batch_size=3)  # type: ignore[arg-type]
    watcher = LastEpoch(3)
    averaging = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
    callbacks = [averaging, watcher, *ours]
    trainer(2, max_epochs=3, callbacks=callbacks).fit(module, batches)
    return watcher


@pytest.mark.parametrize("front", ["mixin", "callback"])
def test_weights_do_not_move_in_batchnorm_epoch(front: str) -> None:
    """No backward pass runs in it, but Lightning steps at its end."""
    module = MixedNormed() if front == "mixin" else Normed()
    ours = [] if front == "mixin" else [AccumulationCallback(PerSample())]
    watcher = fit_with_swa(module, *ours)
    assert len(watcher.seen) == 5
    assert all(torch.equal(watcher.seen[0], seen) for seen in watcher.seen)
    assert torch.equal(weights(module), watcher.seen[0])


def test_plain_lightning_moves_weights_in_batchnorm_epoch() -> None:
    """Negative control: it steps again with the gradients of the last window."""
    watcher = fit_with_swa(Normed())
    assert not torch.equal(watcher.seen[0], watcher.seen[-1])


AVERAGING = {
    "swa": lambda: StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1),
    "ema": lambda: EMAWeightAveraging(decay=0.5),
    "mean": lambda: WeightAveraging(),
}


@pytest.mark.parametrize(
    ("name", "front", "validate"),
    [
        ("swa", "mixin", True),
        ("swa", "callback", False),
        ("ema", "mixin", False),
        ("ema", "callback", True),
        ("mean", "mixin", True),
        ("mean", "callback", True),
    ],
)
def test_averaged_weights_equal_those_of_big_batches(
    name: str, front: str, validate: bool
) -> None:
    """Also where validation swaps the weights inside a window."""
    make: Any = AVERAGING[name]
    exact = MixedValidated() if front == "mixin" else Validated()
    reference = Validated()
    ours = [] if front == "mixin" else [AccumulationCallback(PerToken())]
    start = weights(exact)
    options = {"max_epochs": 3, "limit_val_batches": int(validate)}
    fitted = trainer(WINDOW, callbacks=[make(), *ours], val_check_interval=3, **options)
    fitted.fit(exact, micro_batches(SEQUENCES), micro_batches(SEQUENCES))
    trainer(callbacks=[make()], **options).fit(
        reference, micro_batches(SEQUENCES, merged(RAGGED)), micro_batches(SEQUENCES)
    )
    assert deviation(exact, reference, start) <= 1e-10


class Validated(Plain):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(self.net, batch)


class MixedValidated(AccumulationMixin, Validated):
    accumulation = PerToken()


def test_mixed_is_not_validated() -> None:
    """The two modules of this file differ in nothing else."""
    assert torch.equal(weights(MixedValidated()), weights(Mixed()))
