"""A metric object whose options `training_step` sets before it calls the object."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError

from tests.helpers import trainer
from tests.lit.proof.zoo import Base
from trainkit import AccumulationCallback, MicroBatching, PerSample


class Scaled(MeanSquaredError):
    """Has no scale until it is given one, as losses of forecasts have."""

    scale: Any

    def update(self, preds: Tensor, target: Tensor) -> None:
        super().update(preds * self.scale, target)


class Forecast(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.loss = nn.Linear(4, 1), Scaled()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.loss.scale = 2.0
        value = self.loss(self.net(batch[0])[:, 0], batch[1])
        self.log("loss", value)
        return value


def test_an_option_that_training_step_sets_holds_in_split_windows() -> None:
    torch.manual_seed(0)
    rows = list(zip(torch.randn(8, 4), torch.randn(8), strict=True))
    logged = []
    for options in (MicroBatching(size=8), MicroBatching(size=2)):
        torch.manual_seed(1)
        module = Forecast()
        pl = trainer(
            1, callbacks=[AccumulationCallback(PerSample(), micro_batching=options)]
        )
        pl.fit(module, DataLoader(rows, batch_size=8))  # type: ignore[arg-type]
        logged.append((pl.callback_metrics["loss"], module.net.weight.detach()))
    torch.testing.assert_close(logged[0], logged[1])
