"""Lightning's own finetuning: parameters that join the training later."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch.utils.data import DataLoader

from tests.core.common import relative
from tests.core.test_joining import EXACT, ROWS, SIZES, loss_of, make_net
from tests.helpers import trainer, weights
from trainkit import AccumulationCallback, PerSample


class Finetuned(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[2].parameters(), lr=0.5)


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(
                pl_module.net[0], optimizer, initial_denom_lr=1
            )


def finetuned(batches: Any, accumulate: int, *callbacks: Any) -> Finetuned:
    module = Finetuned()
    fit = trainer(accumulate, max_epochs=3, callbacks=[Unfreeze(), *callbacks])
    fit.fit(module, DataLoader(batches, batch_size=None))
    return module


@pytest.mark.parametrize("wide", [True, False])
def test_unfreeze_and_add_param_group_equals_the_big_batch(wide: bool) -> None:
    """0.75 of their gradient was what parameters of the new group got."""
    ours = AccumulationCallback(PerSample(), wide_gradients=wide)
    found = finetuned(ROWS.split(SIZES), 4, ours)
    whole = finetuned([ROWS], 1)
    assert relative(weights(found), weights(whole)) <= EXACT
    plain = finetuned(ROWS.split(SIZES), 4)
    assert relative(weights(plain), weights(whole)) > 1e-2
