"""The proof puts back which layers train."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import weights
from tests.lit.measure.starting import fit, images
from tests.lit.proof.zoo import Images, classified
from trainkit import PerSample


class Toggling(Images):
    """Drops out in its first step only."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.net.eval()
        return loss


@pytest.mark.filterwarnings("ignore:.*in eval mode at the start of training")
def test_a_step_that_sets_modes_finds_them_as_they_were() -> None:
    """The control: a training that begins in evaluation mode is another one."""
    trained = {}
    for proof, begins_in in (("warn", True), ("off", True), ("off", False)):
        torch.manual_seed(1)
        module = Toggling(classified, lambda width: nn.Dropout(0.5)).train()
        module.net.train(begins_in)
        fit(module, images(), PerSample(), proof=proof, max_epochs=1)
        trained[proof, begins_in] = weights(module)
    assert torch.equal(trained["warn", True], trained["off", True])
    assert not torch.equal(trained["off", False], trained["off", True])
