"""Modules whose loss looks across the rows of a batch, and how they are trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.core.inside.common import CLASSES, Loss, Net, batch, nt_xent
from tests.helpers import trainer
from trainkit import AccumulationCallback, AccumulationMixin, MicroBatching

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
}


class Foreign(pl.LightningModule):
    """A module that knows nothing of trainkit."""

    def __init__(
        self,
        loss: Loss = nt_xent,
        *,
        net: Any = None,
        calls: int = 1,
        optimizer: str = "sgd",
    ) -> None:
        super().__init__()
        self.net: Any = (net or Net()).double()
        self.scale = torch.nn.Parameter(torch.ones(CLASSES, dtype=torch.float64))
        self._loss, self._calls, self._optimizer = loss, calls, optimizer
        self.logged: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, labels = batch
        out = self(x)
        for n in range(1, self._calls):
            out = out + self(x.roll(n, 1)) / n
        loss = self._loss(out, labels)
        self.log("loss", loss)
        self.logged.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self._optimizer](self.parameters())


class Own(AccumulationMixin, Foreign):
    """The same module with the mixin."""


def data(rows: int = 66, size: int = 22) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*batch(rows)), batch_size=size)


def fit(
    module: Any,
    options: MicroBatching | None = None,
    *callbacks: Any,
    by: Any = None,
    proof: Any = "warn",
    loader: Any = None,
    accumulate: int = 1,
    **how: Any,
) -> Any:
    """The Trainer of two epochs: with an inner cut, weighed by a strategy, or as
    Lightning does it."""
    own: Sequence[Any] = ()
    if isinstance(module, AccumulationMixin):
        module.micro_batching = options
    elif options is not None or by is not None:
        how_ours: Any = {"micro_batching": options, "proof": proof}
        own = [AccumulationCallback(by, **how_ours)]
    torch.manual_seed(5)
    run = trainer(accumulate, max_epochs=2, callbacks=[*own, *callbacks], **how)
    run.fit(module, data() if loader is None else loader)
    return run
