"""A window needs the memory of its largest micro-batch, whatever its size."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import DataLoader

from tests.helpers import trainer
from tests.lit.fronts import Plain, plain_token_loss
from tests.lit.split.common import Split
from trainkit.core.split.micro_batching import MicroBatching

LENGTH = 12


def same_length(number: int) -> list[dict[str, Tensor]]:
    ids = torch.arange(number * LENGTH).view(number, LENGTH) % 13
    return [{"ids": row, "labels": row} for row in ids]


class Saved:
    """Counts the bytes that autograd holds, and their greatest number."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def pack(self, tensor: Tensor) -> Any:
        held = _Held(self, tensor)
        self.now += held.size
        self.peak = max(self.peak, self.now)
        return held

    def unpack(self, held: Any) -> Tensor:
        return held.tensor


class _Held:
    def __init__(self, saved: Saved, tensor: Tensor) -> None:
        self.saved = saved
        self.tensor = tensor
        self.size = tensor.numel() * tensor.element_size()

    def __del__(self) -> None:
        self.saved.now -= self.size


class Returning(Split):
    """Also returns something of its graph."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch["ids"])
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten()
        )
        self.log("loss", loss)
        return {"loss": loss, "logits": logits, "mean": logits.mean()}


def peak(module: pl.LightningModule, rows: int) -> int:
    saved = Saved()
    with saved_tensors_hooks(saved.pack, saved.unpack):
        batches = DataLoader(same_length(rows), batch_size=rows)  # type: ignore[arg-type]
        trainer(1, max_epochs=1).fit(module, batches)
    assert saved.now == 0
    return saved.peak


@pytest.mark.parametrize("made", [Split, Returning])
@pytest.mark.parametrize("rows", [8, 16, 64])
def test_saved_tensors_are_those_of_one_micro_batch(
    made: type[Split], rows: int
) -> None:
    alone = peak(made(cut=MicroBatching(size=4)), 4)
    assert peak(made(cut=MicroBatching(size=4)), rows) == alone > 0


def test_saved_tensors_of_a_whole_batch_grow_with_it() -> None:
    """Negative control; and one that sums the losses before a single backward pass."""
    alone = peak(Split(cut=None), 4)
    assert peak(Split(cut=None), 16) > 3 * alone

    class Summing(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            parts = zip(batch["ids"].split(4), batch["labels"].split(4), strict=True)
            losses = [
                plain_token_loss(self.net, {"ids": x, "labels": y}) for x, y in parts
            ]
            return torch.stack(losses).mean()

    assert peak(Summing(), 16) > 3 * alone
