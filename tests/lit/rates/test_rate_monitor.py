"""Learning rates in the log: a row for each step, not for each micro-batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LearningRateMonitor

from tests.helpers import loader, quiet_lightning, trainer
from trainkit import AccumulationCallback, LearningRates, MetricsCSVLogger, PerSample


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.25)


def steps_logged(callback: Callback, where: Path) -> list[str]:
    logger = MetricsCSVLogger(where)
    callbacks = [AccumulationCallback(PerSample()), callback]
    fit = trainer(
        3, callbacks=callbacks, logger=logger, log_every_n_steps=1, max_epochs=1
    )
    with quiet_lightning():
        fit.fit(Net(), loader(list(torch.randn(16, 2)), 2, collate=torch.stack))
    rows = logger.rows()
    assert {row["lr-SGD"] for row in rows} == {"0.25"}
    return [row["step"] for row in rows]


@pytest.mark.filterwarnings("ignore:.*no learning rate schedulers:RuntimeWarning")
def test_each_step_is_logged_once(tmp_path: Path) -> None:
    assert steps_logged(LearningRates(logging_interval="step"), tmp_path) == [
        "0",
        "1",
        "2",
    ]


@pytest.mark.filterwarnings("ignore:.*no learning rate schedulers:RuntimeWarning")
def test_lightnings_own_logs_each_micro_batch(tmp_path: Path) -> None:
    """The control: windows of 3, 3 and 2."""
    theirs = steps_logged(LearningRateMonitor(logging_interval="step"), tmp_path)
    assert theirs == ["0", "0", "0", "1", "1", "1", "2", "2"]
