"""Learning rates in the log: a row for each step, not for each micro-batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import Logger

from tests.helpers import loader, quiet_lightning, trainer
from trainkit import AccumulationCallback, LearningRates, PerSample


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.25)


class Steps(Logger):
    """Keeps the steps of the rows."""

    name = version = "steps"  # type: ignore[assignment]  # properties in Logger

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int | None] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        assert metrics == {"lr-SGD": 0.25}
        self.found.append(step)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


def steps_logged(callback: Callback) -> list[int | None]:
    logger = Steps()
    callbacks = [AccumulationCallback(PerSample()), callback]
    fit = trainer(
        3, callbacks=callbacks, logger=logger, log_every_n_steps=1, max_epochs=1
    )
    with quiet_lightning():
        fit.fit(Net(), loader(list(torch.randn(16, 2)), 2, collate=torch.stack))
    return logger.found


@pytest.mark.filterwarnings("ignore:.*no learning rate schedulers:RuntimeWarning")
def test_each_step_is_logged_once() -> None:
    assert steps_logged(LearningRates(logging_interval="step")) == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:.*no learning rate schedulers:RuntimeWarning")
def test_lightnings_own_logs_each_micro_batch() -> None:
    """The control: windows of 3, 3 and 2."""
    theirs = steps_logged(LearningRateMonitor(logging_interval="step"))
    assert theirs == [0, 0, 0, 1, 1, 1, 2, 2]
