"""A callback that keeps what NoiseScale has measured."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from trainkit import NoiseScale


class KeepTable(pl.Callback):
    """Keeps the sums, which the training frees when it ends."""

    table: Tensor

    def __init__(self, noise: NoiseScale) -> None:
        self.noise = noise

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        moments = self.noise._moments
        if moments is not None and moments.num_windows:
            self.table = moments.table
