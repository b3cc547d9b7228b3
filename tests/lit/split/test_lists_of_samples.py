"""Loaders that yield lists of samples, with and without a function that collates."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers import deviation, trainer
from trainkit import AccumulationMixin, PerSample
from trainkit.core.split.micro_batching import MicroBatching


def test_lists_of_vectors_are_counted_where_they_are_named() -> None:
    rows = [torch.arange(5.0) + i for i in range(7)]

    class Listed(AccumulationMixin, pl.LightningModule):
        def __init__(self, strategy: Any, cut: MicroBatching | None) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.accumulation, self.micro_batching = strategy, cut
            self.net = nn.Linear(5, 1)
            self.double()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(torch.stack(list(batch)).double()).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    def trained(strategy: Any, cut: Any, size: int, window: int) -> Listed:
        module = Listed(strategy, cut)
        loader = DataLoader(rows, batch_size=size, collate_fn=list)  # type: ignore[arg-type]
        trainer(window, max_epochs=1).fit(module, loader)
        return module

    whole = trained(PerSample(size=""), None, 7, 1)
    start = Listed(PerSample(size=""), None)
    for cut, size, window in (
        (None, 3, 3),
        (MicroBatching(size=2), 7, 1),
        (MicroBatching(size=2, collate=list), 4, 2),
    ):
        other = trained(PerSample(size=""), cut, size, window)
        assert deviation(other, whole, start) < 1e-12
    # Negative control: by default, a list of tensors is one of fields.
    assert deviation(trained(PerSample(), None, 3, 3), whole, start) > 1e-2
