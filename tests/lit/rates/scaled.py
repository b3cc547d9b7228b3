"""Small trainings whose learning rates are written down, and what they should be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader

from tests.helpers import trainer
from tests.lit.rates.schedulers import MAKERS, Curve
from trainkit.lit.rates.lr_scaling import LRScaling

EXACT = 1e-12
BATCH, BATCHES, WINDOW = 3, 10, 2
STEPS = BATCHES // WINDOW
"""Optimizer steps in an epoch."""
REFERENCE = 1.5
"""A window of two micro-batches of three is four times as large."""
FIRST = {"one": (0.1,), "two": (0.05, 0.2)}


def adamw(parameters: Any, **how: Any) -> AdamW:
    return AdamW(parameters, **{"betas": (0.99, 0.999), "eps": 1e-4, **how})


class Scheduled(pl.LightningModule):
    """Two weights, perhaps in two groups with rates of their own.

    Attributes:
        curve: before each step the groups' rates, then those of `get_last_lr()`.
        groups: before each step the groups' other numbers.
    """

    def __init__(
        self,
        name: str | None = None,
        first: Sequence[Any] = FIRST["two"],
        *,
        optimizer: Callable[..., Any] = SGD,
        interval: str = "step",
        **config: Any,
    ) -> None:
        super().__init__()
        self.name, self.first, self.make = name, first, optimizer
        self.config = {"interval": interval, "monitor": "loss", **config}
        self.weight = nn.ParameterList(
            nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in first
        )
        self.curve: list[list[float]] = []
        self.groups: list[dict[str, Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = sum(batch.mean() * (w**2).sum() for w in self.weight)
        assert isinstance(loss, Tensor)
        # ReduceLROnPlateau sees it get better once, as `Curve` does.
        best = self.trainer.global_step == 2
        self.log("loss", 0.5 if best else 1.0, on_step=True)
        return loss

    def configure_optimizers(self) -> Any:
        pairs = zip(self.weight, self.first, strict=True)
        optimizer = self.make([{"params": [w], "lr": lr} for w, lr in pairs], lr=1.0)
        if self.name is None:
            return optimizer
        config = {"scheduler": MAKERS[self.name](optimizer), **self.config}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        scheduler: Any = self.lr_schedulers() if self.name else None
        said = scheduler.get_last_lr() if scheduler is not None else rates
        self.curve.append([*rates, *map(float, said)])
        group = optimizer.param_groups[0]
        self.groups.append({k: v for k, v in group.items() if k != "params"})


def data(batch: int = BATCH, batches: int = BATCHES) -> DataLoader[Any]:
    return DataLoader(torch.ones(batch * batches, 1, dtype=torch.float64), batch)  # type: ignore[arg-type]


def fit(
    module: Any,
    *callbacks: Any,
    window: int = WINDOW,
    loader: Any = None,
    ckpt_path: Path | None = None,
    **how: Any,
) -> Any:
    """Train for two epochs, and return the module."""
    loader = data() if loader is None else loader
    made = trainer(window, callbacks=list(callbacks), **how)
    made.fit(module, loader, ckpt_path=ckpt_path, weights_only=True)
    return module


def plain(
    name: str | None, steps: int, first: Sequence[float] = FIRST["two"]
) -> list[list[float]]:
    """The curve of torch's scheduler by itself, in a bare loop."""
    if name is None:
        return [[*first, *first]] * steps
    return Curve(name, first).go(steps)


def times(curve: Any, factors: Sequence[float]) -> list[list[float]]:
    pairs = zip(curve, factors, strict=True)
    return [[factor * rate for rate in row] for row, factor in pairs]


def linear(**how: Any) -> LRScaling:
    return LRScaling("linear", **{"reference_batch": REFERENCE, **how})


class Saves(pl.Callback):
    """Saves once, when so many batches are done."""

    def __init__(self, path: Path, after: int) -> None:
        self.path, self.after, self.seen = path, after, 0

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seen += 1
        if self.seen == self.after:
            trainer.save_checkpoint(self.path)
