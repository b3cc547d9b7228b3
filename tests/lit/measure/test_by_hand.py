"""The proof at the start of manual optimization, in modules with the mixin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from tests.helpers import trainer
from tests.lit.measure.starting import ALARM, images, said
from trainkit import AccumulationMixin, PerSample


class Two(AccumulationMixin, LightningModule):
    """Two nets with an optimizer each, in windows of two batches."""

    def __init__(self, reduction: str = "mean", *, calls: str = "accumulate") -> None:
        super().__init__()
        self.automatic_optimization = False
        self.accumulation = PerSample()
        self.reduction, self.calls = reduction, calls
        self.nets = nn.ModuleList(nn.Linear(108, 10) for _ in range(2))

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(net.parameters()) for net in self.nets]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):  # type: ignore[arg-type]
            logits = self.nets[number](batch[0].flatten(1))
            loss = F.cross_entropy(logits, batch[1], reduction=self.reduction)
            if self.calls == "accumulate":
                self.accumulate(loss, batch, optimizer=optimizer)
            else:
                self.manual_backward(loss)
            if self.calls == "trainer's":
                self.trainer.optimizers[number].step()
            elif self.calls != "accumulate":
                optimizer.step()
            elif batch_idx % 2:
                self.finish_window(optimizer)
                optimizer.step()
                optimizer.zero_grad()


def trained(module: Any, proof: Any) -> list[Tensor]:
    module.accumulation_proof = proof
    pl = trainer(1, max_epochs=1, limit_train_batches=4)
    pl.fit(module, images())
    return [each.detach() for each in module.parameters()]


def test_a_mean_is_exact_and_not_a_bit_changes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    weights = []
    for proof in ("require", "off"):
        torch.manual_seed(0)
        weights.append(trained(Two(), proof))
    assert said(capsys).startswith("exact on 5 of your rows")
    for one, other in zip(*weights, strict=True):
        assert torch.equal(one, other)


def test_a_sum_is_not() -> None:
    with pytest.warns(UserWarning, match=f"{ALARM}.*does not divide by what PerSample"):
        trained(Two("sum"), "warn")


@pytest.mark.filterwarnings("ignore:optimizer")
@pytest.mark.parametrize(
    ("calls", "text"),
    [
        ("manual_backward", "manual_backward divides nothing"),
        ("trainer's", "an optimizer that it does not take from self.optimizers()"),
    ],
)
def test_what_has_no_window_is_not_measured(
    capsys: pytest.CaptureFixture[str], calls: str, text: str
) -> None:
    trained(Two(calls=calls), "warn")
    assert text in said(capsys)
