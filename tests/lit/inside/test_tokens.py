"""A fit whose chunks are cut by a budget of tokens equals that of the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers import NAIVE, deviation, trainer
from trainkit import AccumulationCallback, MicroBatching, TrainkitError, check

WIDTH, LENGTH = 6, 9


class Encoder(nn.Module):
    """A transformer whose rows see their own columns that are no padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return self.layers(x, src_key_padding_mask=attention_mask == 0)


class Sentences(pl.LightningModule):
    """A contrastive loss over rows of unlike length."""

    def __init__(self, *, masks: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = Encoder().double()
        self.masks = masks

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mask = batch["mask"]
        out = self.encoder(batch["x"], attention_mask=mask)
        weights = mask[..., None].to(out) if self.masks else torch.ones_like(out)
        mean = (out * weights).sum(1) / weights.sum(1)
        z = nn.functional.normalize(mean, dim=-1)
        return nn.functional.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)).roll(1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    lengths = torch.randint(2, LENGTH + 1, (32,), generator=generator)
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    rows = [{"x": a, "mask": b} for a, b in zip(x, mask, strict=True)]
    return DataLoader(rows, batch_size=16)  # type: ignore[arg-type]


def fit(module: Any, options: MicroBatching | None) -> None:
    callbacks = [AccumulationCallback(micro_batching=options)] if options else []
    torch.manual_seed(2)
    trainer(callbacks=callbacks).fit(module, loader())


@pytest.mark.parametrize("size", [None, 3])
def test_fit_by_tokens_equals_the_whole_batch(
    size: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    start = Sentences()
    whole, module = copy.deepcopy(start), copy.deepcopy(start)
    fit(whole, None)
    options = MicroBatching(tokens=2 * LENGTH, size=size, inside="encoder")
    fit(module, options)
    said = capsys.readouterr().out
    assert "in chunks of at most " in said
    assert "18 tokens" in said
    assert "proof: exact on" in said
    assert deviation(module, whole, start) <= 1e-12
    assert check(start, loader(), micro_batches=options).exact


@pytest.mark.filterwarnings("ignore:.*an open window of 1 micro-batch was dropped")
def test_a_loss_that_uses_padding_is_refused() -> None:
    """The control: without the refusal the step would be another one."""
    whole, start = Sentences(masks=False), Sentences()
    fit(whole, None)
    other = Sentences()
    fit(other, None)
    assert deviation(other, whole, start) > NAIVE
    with pytest.raises(TrainkitError, match="at padding is used by the loss"):
        fit(Sentences(masks=False), MicroBatching(tokens=18, inside="encoder"))
