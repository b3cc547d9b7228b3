"""A callback that keeps what NoiseScale has measured."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from trainkit import NoiseScale


class KeepTable(pl.Callback):
    """Keeps the sums of each measured window, which the training frees at its end."""

    table: Tensor

    def __init__(self, noise: NoiseScale) -> None:
        self.noise = noise

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if self.noise._moments is not None:
            self.table = self.noise._moments.table
