"""A callback that keeps what NoiseScale has measured."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from trainkit import NoiseScale


class KeepTable(pl.Callback):
    """Keeps the sums of each measured window, which the training frees at its end."""

    def __init__(self, noise: NoiseScale) -> None:
        self.noise = noise
        self._rows: dict[int, Tensor] = {}
        self.blocks: Tensor | None = None

    @property
    def table(self) -> Tensor:
        return torch.stack(list(self._rows.values()))

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        moments = self.noise._moments
        if moments is not None and moments.newest is not None:
            self._rows[moments.num_windows] = moments.newest
            self.blocks = moments.table
